"""Job that uploads a model and loads it again, in a process whose environment variables name the hub."""

from __future__ import annotations

import os
import sys
import tempfile

import torch

import clearhead as ch
from clearhead.apps.cli.main import main

PAIR = "ein hund", "hund ein"

if __name__ == "__main__":
    model = ch.load(sys.argv[1], device="cpu", precision="fp32")
    for name, format in (("someone/own", "clearhead"), ("someone/theirs", "hf")):
        print(model.push_to_hub(name, format=format, private=True))
        again = ch.load(name, device="cpu", precision="fp32")
        assert abs(again.score(*PAIR).log_probability - model.score(*PAIR).log_probability) < 1e-4
        print(repr(again))
    again = ch.load("someone/own", device="cpu", precision="fp32")
    for address, weight in model.module.state_dict().items():
        assert torch.equal(weight, again.module.state_dict()[address]), address
    assert again.push_to_hub("someone/copy", format="clearhead").endswith("1" * 40)
    with tempfile.TemporaryDirectory() as out:
        assert main(["convert", sys.argv[1], f"{out}/int8", "--precision", "int8", "--push", "someone/int8"]) == 0
        assert main(["convert", sys.argv[1], f"{out}/hf", "--to", "hf", "--push", "someone/broken"]) == 2
    for name in ("someone/refused", "someone/broken", "own", "someone/own@main", "someone/new"):
        if name == "someone/new":
            del os.environ["HF_TOKEN"]
        try:
            model.push_to_hub(name)
        except ch.InputError as error:
            print(f"{name} -> {error}")
