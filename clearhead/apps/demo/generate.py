"""`clearhead demo generate`: a language model of the Python library on this machine writes a function."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from clearhead.apps.demo.common import DemoOutcome, DemoPlan, load_trained, train_on_library, write_heads_page
from clearhead.base.commands import make_command, quote
from clearhead.base.errors import InputError

if TYPE_CHECKING:
    from clearhead.model.facade import Model

# A file's first lines, so that the model knows where it is; the name of the function is its own.
PROMPT = '"""Read and write settings."""\n\nimport os\n\n\ndef'
# Behind two blank lines, or at the next line that is not indented, the function is over.
STOP = ("\n\n\n", "\ndef ", "\nclass ", "\n@", "\n#", "\nif ")
RECIPE = """
[task]
kind = "generate"
[data]
train = {{ text = {train}, pattern = "*.py" }}
valid = {{ text = {valid}, pattern = "*.py" }}
max_length = 128
[tokenizer]
kind = "byte-bpe"
vocab_size = 2048
[model]
family = "decoder"
layers = 4
width = 128
heads = 4
feedforward = 352
activation = "silu"
gated = true
norm = "rms"
norm_place = "pre"
positions = "rotary"
qk_norm = true
bias = false
dropout = 0.0
[train]
run = {run}
steps = 450
batch_tokens = 1024
optimizer = "muon"
learning_rate = 0.01
schedule = "cosine"
warmup = 45
clip = 1.0
validate_every = 150
keep = 10
"""


@dataclass(frozen=True)
class GenerateSizes:
    """How much text is taken, and how much is written.

    Args:
        max_bytes: the largest total size of the files to learn from.
        max_valid_bytes: the largest total size of the files held out.
        num_functions: how many functions are written, each with its own seed.
        max_new_tokens: the longest function.
        folder: where the sources are; None: where this Python keeps its library.
    """

    max_bytes: int = 3_000_000
    max_valid_bytes: int = 100_000
    num_functions: int = 2
    max_new_tokens: int = 120
    folder: Path | None = None


FULL = GenerateSizes()


def run_generate(plan: DemoPlan, sizes: GenerateSizes = FULL) -> DemoOutcome:
    """Gather the sources, train, measure the held-out files before and after, and write functions.

    Args:
        plan: the options of every demo.
        sizes: how much text is taken, and how much is written.

    Returns:
        Bits per byte of the held-out files, and what was written.
    """
    if plan.batch_size is not None:
        raise InputError(
            "--batch-size has no effect on the demo 'generate', which writes one text at a time; remove it"
        )
    console = plan.console
    sources = train_on_library(
        RECIPE, plan, max_bytes=sizes.max_bytes, max_valid_bytes=sizes.max_valid_bytes, folder=sizes.folder
    )
    texts = [file.text for file in sources.valid]
    # The run kept its first checkpoint: the same weights before they learned anything.
    untrained, model = load_trained(plan, "step-0"), load_trained(plan)
    before, after = (bits_per_byte(trained, texts) for trained in (untrained, model))
    console.print(
        f"\nBits for each byte of the {len(texts)} files held out: [bold]{before:.2f}[/bold] before training, "
        f"[bold]{after:.2f}[/bold] after it; 8 without a model."
    )
    functions = [write_function(console, model, plan, sizes, number) for number in range(sizes.num_functions)]
    write_heads_page(model, PROMPT, plan, generate=24)
    ref = quote(str(plan.run))
    return DemoOutcome(
        record={"bits_per_byte": {"before": before, "after": after}, "prompt": PROMPT, "functions": functions},
        pictures={},
        commands={
            "Write more": make_command(f"generate {ref} --prompt 'class Reader:' --temperature 0.8 --top-k 40"),
            "Score your own code": make_command(f"evaluate {ref} --text mine.py"),
        },
    )


def bits_per_byte(model: Model, texts: Sequence[str]) -> float:
    """Return how many bits the model needs for a byte of some texts, each a document of its own."""
    from clearhead.tasks.evaluate.text_loss import text_loss

    window = model.task.max_length
    assert window is not None, "a run notes the length of its blocks"
    # Half of each window is context: the model is scored on code in the middle of what it sees, not at the edge.
    bits = text_loss(model.exact.tree, model.tokenizer, texts, window=window, stride=window // 2).bits_per_byte
    assert bits is not None, "the bytes of texts are known"
    return bits


def write_function(console: Console, model: Model, plan: DemoPlan, sizes: GenerateSizes, number: int) -> str:
    """Stream one function to the terminal; return its text, prompt included."""
    console.print(f"\n[dim]{PROMPT}[/dim]" if number == 0 else "\n[dim]def[/dim]", end="")
    written = ""
    for text in model.stream(
        PROMPT,
        max_new_tokens=sizes.max_new_tokens,
        temperature=0.7,
        top_k=40,
        stop=STOP,
        seed=plan.seed + number,
    ):
        console.print(text, end="", markup=False)
        written += text
    console.print()
    return PROMPT + written
