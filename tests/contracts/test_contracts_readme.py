"""The consumers that the READMEs show work as they stand, but for address and group."""

import json
import os
import re
import subprocess
import sys
from threading import Timer
from uuid import uuid4

import pytest
from confluent_kafka import Producer
from contract_checks import ROOT

from chassis.contracts import every_message

TOPIC = "pin.crm.timeline-overdue.v1"


def shown_consumer(path: str) -> str:
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / path).read_text(), re.MULTILINE | re.DOTALL)
    return next(block for block in blocks if "Consumer(" in block)


@pytest.mark.messaging
@pytest.mark.parametrize("path", ["README.md", "contracts/README.md"])
def test_the_shown_consumer_prints_the_event(path, broker, contracts):
    code = shown_consumer(path)
    for literal, value in (("127.0.0.1:8192", broker.running.bootstrap), ("my-team", f"readme-{uuid4()}")):
        assert code.count(literal) == 1
        code = code.replace(literal, value)
    example = next(message for _, message in every_message(contracts) if message.topic == TOPIC).examples[0]
    headers = example["headers"] | {"ce_id": str(uuid4())}
    producer = Producer({"bootstrap.servers": broker.running.bootstrap})
    producer.produce(TOPIC, json.dumps(example["payload"]), headers["ce_subject"], headers=headers)
    assert producer.flush(20) == 0

    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment) as reader:
        too_late = Timer(30, reader.kill)
        too_late.start()
        line = next((line for line in reader.stdout or () if line.startswith(headers["ce_id"])), "")
        too_late.cancel()
        reader.kill()
    assert line.endswith(f"{example['payload']}\n")
