"""x"""


def run():
    return 0
