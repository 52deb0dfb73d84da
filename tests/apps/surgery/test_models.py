"""Surgery on models with tokenizers: added and removed words, other heads, saving and loading."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

import clearhead
from clearhead import surgery
from clearhead.base.errors import InputError, LongTexts
from clearhead.checkpoints.hf.loading import load_module
from clearhead.checkpoints.hf.saving import save_module
from clearhead.core import Transformer, build
from clearhead.spec.presets.hyperparameters import Hyperparameters, build_spec
from clearhead.spec.presets.task_heads import token_head, vector_head
from clearhead.spec.tasks.record import TaskRecord
from clearhead.text.pair import TokenizerPair
from clearhead.text.tokenizer_training import train_tokenizer
from tests import hf_models
from tests.apps.surgery.models import FAMILIES, attentions, family, same_run, scramble
from tests.checkpoints.hf import tokenizer_folders
from tests.laws.tiny import difference
from tests.parity.architectures.harness import no_complaints

TEXTS = ["the cat sat on the mat, and the dog looked at it.", "a small dog runs over the green grass in 1998!"]
WORDS = ["Zyzzyva", "foo-bar"]
# Families whose networks are four times as wide as the model, and whose configuration names no other size.
FOURFOLD = ("bloom", "mpt")
SIZES = {"word": 400, "bpe": 150, "byte-bpe": 331, "unigram": 118, "wordpiece": 210}


@pytest.fixture(scope="module")
def gpt(tmp_path_factory: pytest.TempPathFactory) -> clearhead.Model:
    return clearhead.load(hf_models.language_model(tmp_path_factory.mktemp("gpt") / "model"), device="cpu")


@pytest.fixture(scope="module")
def masked(tmp_path_factory: pytest.TempPathFactory) -> clearhead.Model:
    folder = tmp_path_factory.mktemp("masked") / "model"
    entries = tokenizer_folders.word_list()
    torch.manual_seed(7)
    config = transformers.BertConfig(
        vocab_size=entries.count("\n"), hidden_size=26, num_hidden_layers=3, num_attention_heads=2,
        intermediate_size=31, max_position_embeddings=67, initializer_range=0.3, pad_token_id=0,
    )  # fmt: skip
    hf_models.save(transformers.BertForMaskedLM(config), folder)
    settings = {"tokenizer_class": "BertTokenizer", "do_lower_case": True}
    return clearhead.load(
        tokenizer_folders.write(folder, {"vocab.txt": entries, "tokenizer_config.json": settings}), device="cpu"
    )


def model_with_tokenizer(kind: str) -> clearhead.Model:
    """Return a language model with a tokenizer trained here."""
    tokenizer = train_tokenizer(kind, tokenizer_folders.SENTENCES, vocab_size=SIZES[kind])
    hparams = Hyperparameters(
        family="decoder", layers=2, width=12, heads=2, feedforward=19, dropout=0.0, positions="rotary"
    )
    size = tokenizer.vocab_size
    module = scramble(clearhead.build(build_spec(hparams, source_vocab=size, target_vocab=size)).eval())
    return clearhead.Model(module, TokenizerPair(tokenizer, tokenizer, joint=True), TaskRecord(kind="generate"))


def logits(module: Transformer, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return module(torch.tensor([ids])).logits[0]


def check_saved(model: clearhead.Model, folder: Path, *, hf: bool = True) -> None:
    """Check that both layouts save and load the same model."""
    text = f"a {WORDS[0]} sat on the mat"
    for layout in ("clearhead", "hf") if hf else ("clearhead",):
        model.save(folder / layout, format=layout)
        again = clearhead.load(folder / layout, device="cpu")
        assert again.tokenizer.encode(text) == model.tokenizer.encode(text)
        assert torch.equal(same_run(again.module).logits, same_run(model.module).logits)


@pytest.mark.parametrize("which", ["gpt", "masked"])
def test_new_words_are_one_id_each_here_and_in_transformers(
    which: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    model: clearhead.Model = request.getfixturevalue(which)
    edited = surgery.grow_vocabulary(model, WORDS)
    grown, text = edited.model, f"the {WORDS[0]} sat on {WORDS[1]} and on the mat"
    size = model.tokenizer.vocab_size
    ids = grown.tokenizer.encode(text)
    assert [index for index in ids if index >= size] == [size, size + 1]
    assert grown.module.num_target_ids == grown.tokenizer.vocab_size == size + 2
    assert WORDS[0].lower() in grown.tokenizer.decode(ids).lower()
    plain = model.tokenizer.encode(TEXTS[0])
    assert grown.tokenizer.encode(TEXTS[0]) == plain
    assert difference(logits(grown.module, plain)[:, :size], logits(model.module, plain)) <= 1e-6
    check_saved(grown, tmp_path)
    with no_complaints():
        twin = transformers.AutoModelForCausalLM if which == "gpt" else transformers.AutoModelForMaskedLM
        theirs = twin.from_pretrained(tmp_path / "hf").eval()
        tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert tokenizer(text, add_special_tokens=False)["input_ids"] == ids
    with torch.no_grad():
        assert difference(logits(grown.module, ids), theirs(torch.tensor([ids])).logits[0]) <= 1e-5


def test_a_word_may_begin_as_its_pieces(gpt: clearhead.Model) -> None:
    table = gpt.module.decoder.embedding.table.weight
    grown = surgery.grow_vocabulary(gpt, ["dogcat"], start="pieces").model
    pieces = gpt.tokenizer.encode("dogcat")
    assert difference(grown.module.decoder.embedding.table.weight[-1], table[pieces].mean(0)) <= 1e-6


def test_rows_that_no_entry_had_are_given_to_words(gpt: clearhead.Model) -> None:
    padded = surgery.grow_vocabulary(gpt, 5, start="draw").model
    size = gpt.tokenizer.vocab_size
    grown = surgery.grow_vocabulary(padded, WORDS)
    assert grown.model.module.num_target_ids == size + 5
    table = grown.model.module.decoder.embedding.table.weight
    assert difference(table[size], padded.module.decoder.embedding.table.weight.mean(0)) <= 1e-5
    assert torch.equal(table[size + 2 :], padded.module.decoder.embedding.table.weight[size + 2 :])


@pytest.mark.parametrize("kind", SIZES)
def test_a_cut_vocabulary_reads_what_is_left_of_it_as_before(kind: str, tmp_path: Path) -> None:
    model = model_with_tokenizer(kind)
    tokenizer = model.tokenizer
    keep = tokenizer.needed_ids(TEXTS)
    assert len(keep) < tokenizer.vocab_size
    small = surgery.cut_vocabulary(model, keep).model
    assert small.tokenizer.vocab_size == small.module.num_target_ids == len(keep)
    for text in TEXTS:
        old, new = tokenizer.encode(text), small.tokenizer.encode(text)
        assert [keep[index] for index in new] == old
        assert small.tokenizer.decode(new) == tokenizer.decode(old)
        assert difference(logits(small.module, new), logits(model.module, old)[:, keep]) <= 1e-6
    check_saved(small, tmp_path, hf=False)


def test_what_cannot_be_cut() -> None:
    model = model_with_tokenizer("byte-bpe")
    size = model.tokenizer.vocab_size
    with pytest.raises(InputError, match="must keep it"):
        surgery.cut_vocabulary(model, range(1, size))
    with pytest.raises(InputError, match="is a single character of this BPE tokenizer"):
        surgery.cut_vocabulary(model, [*range(30), *range(31, size)])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["the"], "'the' is already in the vocabulary"),
        (["new", "new"], "'new' is given twice"),
        ([" "], "a character that is not white space"),
        ([], "`words` must not be empty"),
    ],
)
def test_words_that_cannot_be_added(gpt: clearhead.Model, words: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        surgery.grow_vocabulary(gpt, words)


def test_a_sentencepiece_model_learns_no_words(tmp_path: Path) -> None:
    model = clearhead.load(hf_models.translator(tmp_path / "marian"), device="cpu")
    with pytest.raises(InputError, match="each side has its own tokenizer"):
        surgery.grow_vocabulary(model, ["new"])
    with pytest.raises(InputError, match="a module has no tokenizer"):
        surgery.grow_vocabulary(model.module, ["new"])


def test_fewer_layers_stay_in_the_family(gpt: clearhead.Model, tmp_path: Path) -> None:
    small = surgery.keep_layers(gpt, [1]).model
    check_saved(small, tmp_path)
    with no_complaints():
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    ids = small.tokenizer.encode(TEXTS[0])
    with torch.no_grad():
        assert difference(logits(small.module, ids), theirs(torch.tensor([ids])).logits[0]) <= 1e-5
    assert small.generate(TEXTS[0], max_new_tokens=3, temperature=0)[0].text


def test_an_encoder_becomes_a_translator(masked: clearhead.Model, tmp_path: Path) -> None:
    whole = surgery.to_encoder_decoder(masked).model
    assert whole.task.kind == "translate"
    whole.save(tmp_path / "whole")
    again = clearhead.load(tmp_path / "whole", device="cpu")
    assert again.spec == whole.spec
    ids = torch.randint(5, 60, (2, 7))
    with torch.no_grad():
        assert torch.equal(again.module(ids, ids).logits, whole.module(ids, ids).logits)


def test_outputs_are_for_what_the_head_says(masked: clearhead.Model, gpt: clearhead.Model) -> None:
    vectors = surgery.replace_head(masked, vector_head(pool="mean")).model
    assert vectors.task.kind == "embed" and vectors.embed(TEXTS).shape == (2, 26)
    tagger = surgery.replace_head(masked, token_head(3)).model
    assert tagger.task.kind == "tag" and tagger.task.labels == ("LABEL_0", "LABEL_1", "LABEL_2")
    assert surgery.keep_layers(masked, [0]).model.task == masked.task
    assert surgery.to_encoder(gpt, head=vector_head(pool="last")).model.embed(TEXTS).shape == (2, 26)


def test_a_task_stays_where_the_new_head_returns_the_same() -> None:
    """A language model of two stacks stays a language model, and does not become a translator."""
    tokenizer = train_tokenizer("word", tokenizer_folders.SENTENCES, vocab_size=SIZES["word"])
    hparams = Hyperparameters(family="encoder-decoder", layers=1, width=12, heads=2, feedforward=19, dropout=0.0)
    module = build(build_spec(hparams, source_vocab=tokenizer.vocab_size, target_vocab=tokenizer.vocab_size))
    record = TaskRecord(kind="generate", max_length=20)
    model = clearhead.Model(module.eval(), TokenizerPair(tokenizer, tokenizer, joint=True), record)
    assert surgery.replace_head(model, module.spec.head).model.task == record
    assert surgery.replace_head(model, token_head(3)).model.task.kind == "tag"


def test_longer_texts_are_read_whole(masked: clearhead.Model) -> None:
    vectors = surgery.replace_head(masked, vector_head(pool="mean")).model
    text = " ".join(TEXTS * 3)
    with pytest.warns(LongTexts):
        vectors.embed([text])
    longer = surgery.resize_positions(vectors, 300).model
    assert longer.embed([text]).shape == (1, 26)
    trained = vectors.with_module(vectors.module, task=TaskRecord(kind="embed", max_length=67))
    assert surgery.resize_positions(trained, 300).model.task.max_length == 300


OPERATIONS: dict[str, Callable[[Transformer], Transformer]] = {
    "layers": lambda module: (
        surgery.keep_layers(module, [0], stack="decoder" if module.decoder is not None else "encoder").model
    ),
    "words": lambda module: surgery.grow_vocabulary(module, 3).model,
    "neurons": lambda module: (
        surgery.remove_neurons(
            module,
            {
                f"{side}.layers.*.steps.*.branches.*.function": [2]
                for side in ("encoder", "decoder")
                if getattr(module, side)
            },
        ).model
    ),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_writes_what_it_can_say(name: str, tmp_path: Path) -> None:
    """Each family saves a smaller stack, more words and fewer neurons, or refuses with a reason."""
    case = FAMILIES[name]
    module = family(case)
    for operation, change in OPERATIONS.items():
        edited = change(module)
        if operation == "neurons" and name in FOURFOLD:
            with pytest.raises(InputError, match="size: 131 in this model, 132 in the family"):
                save_module(edited, tmp_path / operation, model_type=case.model_type)
            continue
        save_module(edited, tmp_path / operation, model_type=case.model_type)
        again = load_module(tmp_path / operation).module
        weights = edited.state_dict()
        assert all(torch.equal(tensor, weights[address]) for address, tensor in again.state_dict().items())
        # Experts that are read as views of one tensor are summed in another order.
        assert difference(same_run(again).hidden, same_run(edited).hidden) <= 1e-6


def test_heads_of_their_own_size_are_written(tmp_path: Path) -> None:
    """A family whose config has a head size can save fewer heads."""
    module = family(FAMILIES["t5"])
    heads = {address: [1] for address, _ in attentions(module.spec)}
    edited = surgery.remove_heads(module, heads).model
    save_module(edited, tmp_path / "t5", model_type="t5")
    assert torch.equal(same_run(load_module(tmp_path / "t5").module).hidden, same_run(edited).hidden)
    theirs = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path / "t5").eval()
    ids = torch.randint(1, 37, (2, 7))
    with torch.no_grad():
        expected = theirs(input_ids=ids, decoder_input_ids=ids).logits
        assert difference(edited(ids, ids).logits, expected) <= 1e-5
    bert = family(FAMILIES["bert"])
    fewer = surgery.remove_heads(bert, {"encoder.layers.*": [1]}).model
    with pytest.raises(InputError, match="cannot express this model"):
        save_module(fewer, tmp_path / "bert", model_type="bert")
