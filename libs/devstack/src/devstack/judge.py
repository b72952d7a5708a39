"""x"""


def judge_contracts():
    return 0


def try_apache_kafka():
    return 0
