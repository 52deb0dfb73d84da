"""`clearhead demo generate`: a language model of Python's standard library writes functions."""

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

# The first lines of a file as context; the model chooses the name of the function.
PROMPT = '"""Read and write settings."""\n\nimport os\n\n\ndef'
# The function ends after two blank lines, or before the next line without indentation.
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
    """Sizes of the data and of the generated text.

    Args:
        max_bytes: the maximum total size of the training files in bytes.
        max_valid_bytes: the maximum total size of the held-out files in bytes.
        num_functions: the number of functions to generate, each with its own seed.
        max_new_tokens: the maximum length of a function in tokens.
        folder: the folder of the sources. None means the library folder of this Python.
    """

    max_bytes: int = 3_000_000
    max_valid_bytes: int = 100_000
    num_functions: int = 2
    max_new_tokens: int = 120
    folder: Path | None = None


FULL = GenerateSizes()


def run_generate(plan: DemoPlan, sizes: GenerateSizes = FULL) -> DemoOutcome:
    """Collect the sources, train, score the held-out files before and after, and generate functions.

    Args:
        plan: the options of every demo.
        sizes: the sizes of the data and of the generated text.

    Returns:
        The bits per byte on the held-out files, and the generated functions.
    """
    if plan.batch_size is not None:
        raise InputError(
            "--batch-size has no effect on the demo 'generate', which writes one text at a time: remove it"
        )
    console = plan.console
    sources = train_on_library(
        RECIPE, plan, max_bytes=sizes.max_bytes, max_valid_bytes=sizes.max_valid_bytes, folder=sizes.folder
    )
    texts = [file.text for file in sources.valid]
    # The run has its first checkpoint, step 0: the initial weights.
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
    """Return the bits per byte of the model on texts, each as a separate document."""
    from clearhead.tasks.evaluate.text_loss import text_loss

    window = model.task.max_length
    assert window is not None, "a run notes the length of its blocks"
    # Half of each window is context, so that every scored token has enough tokens before it.
    bits = text_loss(model.exact.tree, model.tokenizer, texts, window=window, stride=window // 2).bits_per_byte
    assert bits is not None, "the bytes of texts are known"
    return bits


def write_function(console: Console, model: Model, plan: DemoPlan, sizes: GenerateSizes, number: int) -> str:
    """Generate one function, print it while it is generated, and return its text with the prompt."""
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
