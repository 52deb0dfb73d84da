"""A model ready to use: its module, its tokenizers and what they do together."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import overload

import torch

from clearhead.core import Transformer, build
from clearhead.errors import InputError
from clearhead.generate.candidate import Hypothesis
from clearhead.generate.engine import translate_ids
from clearhead.generate.options import SearchOptions
from clearhead.generate.scoring import PairScore, score_pairs
from clearhead.machine import choose_device, choose_precision
from clearhead.spec import Model as ModelSpec
from clearhead.text import Tokenizer, TokenizerPair
from clearhead.train.checkpoint import writing_folder
from clearhead.train.run_directory import is_run_directory, resolve_reference, split_reference
from clearhead.weights import fill, load_tensors, save_tensors

WEIGHTS_FILE = "weights.safetensors"
SPEC_FILE = "spec.json"


class Model:
    """A trained model with its tokenizers.

    Args:
        module: the network, in evaluation mode.
        tokenizers: of the two sides.
    """

    def __init__(self, module: Transformer, tokenizers: TokenizerPair) -> None:
        self.module = module
        self.tokenizers = tokenizers

    @property
    def spec(self) -> ModelSpec:
        """What the model is."""
        return self.module.spec

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of what the model reads."""
        return self.tokenizers.source

    def translate(
        self,
        texts: Sequence[str],
        *,
        beam_size: int = 5,
        length_penalty: float = 1.0,
        max_length: int | None = None,
        batch_size: int | None = None,
    ) -> list[str]:
        """Return the best translation of each text; an empty text gives an empty one.

        Args:
            texts: one sentence each.
            beam_size: unfinished hypotheses kept for each sentence; 1 is greedy.
            length_penalty: exponent alpha in score = log-probability / length ** alpha.
            max_length: longest translation in tokens, with the end token; None: follows the source.
            batch_size: most sentences decoded together; None: as many as a token budget allows.

        Raises:
            InputError: options out of range, or a text longer than the model's positions.
        """
        options = SearchOptions(beam_size, length_penalty, 1, max_length, batch_size=batch_size)
        return [found[0].text for found in self._search(texts, options)]

    def translate_n_best(
        self,
        texts: Sequence[str],
        *,
        n: int = 5,
        beam_size: int | None = None,
        length_penalty: float = 1.0,
        max_length: int | None = None,
        batch_size: int | None = None,
    ) -> list[list[Hypothesis]]:
        """Return the n best translations of each text, best first, with score and log-probability.

        Args:
            texts, length_penalty, max_length, batch_size: as in `translate`.
            n: hypotheses for each text.
            beam_size: at least n; None: n, but not below 5.
        """
        options = SearchOptions(beam_size or max(n, 5), length_penalty, n, max_length, batch_size=batch_size)
        return self._search(texts, options)

    @overload
    def score(self, source: str, target: str, *, length_penalty: float = 1.0) -> PairScore: ...
    @overload
    def score(self, source: list[str], target: list[str], *, length_penalty: float = 1.0) -> list[PairScore]: ...

    def score(
        self, source: str | list[str], target: str | list[str], *, length_penalty: float = 1.0
    ) -> PairScore | list[PairScore]:
        """Return how probable the model finds each target given its source: the score that search reports.

        Args:
            source: one text, or a list of them.
            target: as many.
            length_penalty: exponent alpha of the score.

        Raises:
            InputError: the counts differ, or a text is longer than the model's positions.
        """
        sources = [source] if isinstance(source, str) else source
        targets = [target] if isinstance(target, str) else target
        pair = self.tokenizers
        scores = score_pairs(
            self.module,
            self._encode(sources),
            pair.target.encode_batch(targets),
            bos_id=pair.target.bos_id,
            eos_id=pair.target.eos_id,
            pad_id=pair.source.pad_id,
            length_penalty=length_penalty,
        )
        return scores[0] if isinstance(source, str) else scores

    def save(self, path: str | Path, *, format: str = "clearhead") -> None:
        """Write spec, tokenizers and weights into a new folder that `load` reads.

        Raises:
            InputError: the folder exists, or the format is not known.
        """
        if format != "clearhead":
            raise InputError(f"format '{format}' cannot be written by this version; use format='clearhead'")
        folder = Path(path)
        if folder.exists():
            raise InputError(f"{folder} exists already; give a new folder")
        with writing_folder(folder) as temporary:
            (temporary / SPEC_FILE).write_text(self.spec.to_json(), encoding="utf-8")
            self.tokenizers.save(temporary)
            save_tensors(temporary / WEIGHTS_FILE, self.module.state_dict())

    def _search(self, texts: Sequence[str], options: SearchOptions) -> list[list[Hypothesis]]:
        if isinstance(texts, str):
            raise InputError("translate() takes a list of texts; put the single text into a list")
        filled = [text for text in texts if text.strip()]
        pair = self.tokenizers
        found = iter(
            translate_ids(
                self.module,
                self._encode(filled),
                bos_id=pair.target.bos_id,
                eos_id=pair.target.eos_id,
                pad_id=pair.source.pad_id,
                options=options,
            )
        )
        nothing = Hypothesis("", [], 0.0, 0.0)
        return [
            [
                Hypothesis(pair.target.decode(one.ids), pair.target.tokens(one.ids), one.score, one.log_probability)
                for one in next(found)
            ]
            if text.strip()
            else [nothing]
            for text in texts
        ]

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        if self.spec.encoder is None or self.spec.decoder is None:
            raise InputError("translation needs a model with encoder and decoder; this one has a single stack")
        end = self.tokenizers.source.eos_id
        return [[*ids, end] for ids in self.tokenizers.source.encode_batch(list(texts))]


def load(ref: str | Path, *, device: str = "auto", precision: str = "auto") -> Model:
    """Load a trained model.

    Args:
        ref: a run directory, optionally with @best, @last, @averaged or @step-N, or a folder that `save` wrote.
        device: auto, cpu, cuda or cuda:N.
        precision: auto, fp32 or bf16.

    Raises:
        InputError: nothing usable is there; the sentence says what was expected.
    """
    where = choose_device(device)
    folder, label = split_reference(str(ref))
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder; expected a run directory or a saved model")
    if is_run_directory(folder):
        weights = resolve_reference(str(ref)).weights
    elif label is not None:
        raise InputError(f"{folder} is a saved model and has no checkpoint '@{label}'")
    else:
        weights = folder / WEIGHTS_FILE
    for needed in (folder / SPEC_FILE, weights):
        if not needed.is_file():
            raise InputError(f"{folder} is no run directory and no saved model: {needed.name} is missing")
    module = build(ModelSpec.from_json((folder / SPEC_FILE).read_text(encoding="utf-8")), device="meta")
    fill(module, load_tensors(weights), source=str(weights))
    module.to(where, torch.bfloat16 if choose_precision(precision, where) == "bf16" else torch.float32)
    tokenizers = TokenizerPair.load(folder)
    _check_vocabulary(module, tokenizers, folder)
    return Model(module.eval(), tokenizers)


def _check_vocabulary(module: Transformer, tokenizers: TokenizerPair, folder: Path) -> None:
    for side, size, rows in (
        ("source", tokenizers.source.vocab_size, module.num_source_ids),
        ("target", tokenizers.target.vocab_size, module.num_target_ids),
    ):
        if size > rows:
            raise InputError(
                f"{folder}: the {side} tokenizer has {size} entries, but the model has {rows} rows for them; "
                "restore the tokenizer that the model was trained with"
            )
