"""Laws of decoding in slots: recorded steps that are replayed give the tokens of the running batch."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator

import pytest
import torch

import clearhead
from clearhead import core as ch
from clearhead.fast.cache import IndexedCache
from clearhead.fast.replica import override, replica
from clearhead.fast.slots import graph
from clearhead.fast.slots.graph import REFUSED, Graphs
from clearhead.fast.slots.tree import SlotOwner
from clearhead.generate import continuation
from clearhead.generate.continuation import GenerateRequest, RequestStarter, generate_ids, stream_ids
from clearhead.generate.options import GenerateOptions, SearchOptions
from clearhead.generate.results import Constraint, GeneratedSequence
from clearhead.generate.running import RunningBatch
from clearhead.generate.slots.batch import DecodingSlots, SlotBatch, SlotSize, bucket, eager_reason
from tests.generate.recording import Recording, record_steps
from tests.generate.tiny import BOS, EOS, PAD, some_prompts, some_sources, tiny_decoder, tiny_model
from tests.laws.host_reads import HostRead, refuse_host_reads
from tests.laws.tiny import MODELS, tiny

GENERATING = [name for name in MODELS if not name.startswith("encoder/")]
GREEDY = GenerateOptions(max_new_tokens=9)
OPTIONS = [
    GREEDY,
    GenerateOptions(max_new_tokens=11, temperature=1.2, top_p=0.9, seed=3, num_return_sequences=2),
    GenerateOptions(max_new_tokens=12, temperature=0.7, top_k=5, min_p=0.02, seed=5, repetition_penalty=1.3),
    GenerateOptions(max_new_tokens=10, no_repeat_ngram_size=2, min_new_tokens=4),
]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[DecodingSlots]]:
    """Decode in slots on the CPU, record steps after two of their kind, and yield all slots that were made."""
    slots: list[DecodingSlots] = []
    create = DecodingSlots.__init__

    def note(new: DecodingSlots, *args: object) -> None:
        create(new, *args)
        slots.append(new)

    monkeypatch.setattr(DecodingSlots, "__init__", note)
    monkeypatch.setattr(continuation, "SLOT_DEVICES", ("cpu", "cuda"))
    record_steps(monkeypatch, least=2)
    yield slots
    REFUSED.clear()


def model(name: str, seed: int = 0) -> ch.Transformer:
    """Return a tiny model with large weights, so that its choices are clear."""
    torch.manual_seed(seed)
    module = tiny(name, max_positions=120)
    with torch.no_grad():
        for weight in module.parameters():
            if weight.dim() > 1:
                weight.normal_(0.0, 0.4)
    return module


def request_for(module: ch.Transformer, options: GenerateOptions, count: int = 5, longest: int = 9) -> GenerateRequest:
    sources = some_sources(count, longest=7) if module.encoder is not None else None
    prompts = some_prompts(count, longest=longest, vocab=module.num_target_ids)
    return GenerateRequest(prompts, options, EOS, PAD, (PAD, BOS), sources)


def ids_of(results: list[list]) -> list[list[tuple[int, ...]]]:
    return [[continuation.ids for continuation in of_prompt] for of_prompt in results]


@pytest.mark.parametrize("name", GENERATING)
def test_replays_choose_the_tokens_of_the_running_batch(name: str, made: list[DecodingSlots]) -> None:
    module = model(name)
    for options in (OPTIONS[0], OPTIONS[2]):
        request = request_for(module, options)
        recorded = generate_ids(module, request)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(continuation, "SLOT_DEVICES", ())
            expected = generate_ids(module, request)
        assert ids_of(recorded) == ids_of(expected)
        for one, other in zip(recorded, expected, strict=True):
            assert one[0].log_probability == pytest.approx(other[0].log_probability, abs=1e-3)
    assert len(made) == 2 and all(slots.graphs.num_replays > 3 for slots in made)


@pytest.mark.parametrize("options", OPTIONS)
def test_every_option_works_in_a_replay(options: GenerateOptions, made: list[DecodingSlots]) -> None:
    module = tiny_decoder("modern", seed=4)
    request = request_for(module, options)
    recorded = generate_ids(module, request)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(continuation, "SLOT_DEVICES", ())
        assert ids_of(recorded) == ids_of(generate_ids(module, request))
    assert made[0].graphs.num_replays > 3


@pytest.mark.parametrize("beams", [1, 3])
def test_translations_run_in_recorded_steps(beams: int, made: list[DecodingSlots]) -> None:
    module = tiny_model("modern", seed=6, end_bonus=-1.0)
    sources = some_sources(6, longest=7)
    request = GenerateRequest([[BOS]] * 6, SearchOptions(beam_size=beams, min_length=9), EOS, PAD, (PAD, BOS), sources)
    recorded = generate_ids(module, request)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(continuation, "SLOT_DEVICES", ())
        assert ids_of(recorded) == ids_of(generate_ids(module, request))
    assert len(made) == 1 and made[0].graphs.num_replays > 3


def test_a_member_joins_without_the_rows_that_end_with_their_first_token(made: list[DecodingSlots]) -> None:
    module = model("decoder/post/rotary", seed=3)
    request = GenerateRequest(some_prompts(4, longest=9, vocab=23, seed=1), GREEDY, EOS, PAD, (PAD, EOS))
    starter, results = RequestStarter(module, request, [1, 6, 1, 4], with_text=False), []
    for running_batch in (RunningBatch(module), SlotBatch(module, SlotSize(4, 64))):
        with torch.inference_mode():
            start = starter.start(range(4))
            rows = list(start.member.sequences)
            progress = running_batch.join([start])
            assert sum(event.is_done for event in progress) == 2 and running_batch.num_rows == 2
            while running_batch.members:
                running_batch.step()
        results.append([row.ids for row in rows])
    assert results[0] == results[1] and [len(ids) for ids in results[0]] == [1, 6, 1, 4]


def test_rows_cross_buckets_of_keys_and_of_rows(made: list[DecodingSlots]) -> None:
    """Prompts of other lengths end one after the other: keys grow over 64 and 96, rows shrink from 8 to 1."""
    module = model("decoder/post/rotary", seed=3)
    prompts = some_prompts(6, longest=30, vocab=23, seed=1)
    limits = [8, 70, 20, 90, 33, 50]
    starter = RequestStarter(module, GenerateRequest(prompts, GREEDY, EOS, PAD, (PAD, EOS)), limits, with_text=False)
    results = []
    for running_batch in (RunningBatch(module), SlotBatch(module, SlotSize(8, 120))):
        sequences: list[GeneratedSequence] = []
        with torch.inference_mode():
            members = [starter.start([number]) for number in range(len(prompts))]
            sequences += [row for start in members for row in start.member.sequences]
            running_batch.join(members)
            while running_batch.members:
                running_batch.step()
        results.append([row.ids for row in sequences])
        assert [len(row.ids) for row in sequences] == limits
    assert results[0] == results[1]
    keys = {key[:3] for key in made[0].graphs._graphs if key[0] == "model"}
    assert {("model", 8, 64), ("model", 4, 96), ("model", 1, 120)} <= keys
    assert [bucket(count) for count in (1, 33, 49, 65, 97, 129)] == [32, 48, 64, 96, 128, 192]


def run_batch(
    new: Callable[[], RunningBatch], module: ch.Transformer, arrivals: list[int], leaving: dict[int, int]
) -> dict[int, list[int]]:
    """Let requests join after some steps, some leave, and one pause for three steps; return the ids of the others."""
    running_batch, step, owner = new(), 0, dict[int, GeneratedSequence]()
    paused: dict[int, list] = {}
    done: dict[int, list[int]] = {}
    while step <= max(arrivals) or running_batch.members or paused:
        with torch.inference_mode():
            starting = []
            for number in [number for number, arrival in enumerate(arrivals) if arrival == step]:
                options = dataclasses.replace(OPTIONS[number % len(OPTIONS)], num_return_sequences=1)
                request = request_for(module, options, count=number + 1)
                starter = RequestStarter(module, request, [options.max_new_tokens] * (number + 1), with_text=False)
                starting.append(starter.start([number]))
                (owner[number],) = starting[-1].member.sequences
            progress = running_batch.join(starting) if starting else []
            for number, sequence in owner.items():
                if leaving.get(number) == step:
                    running_batch.drop(sequence)
                if number % 3 == 1 and step == arrivals[number] + 4:
                    rows = running_batch.pause(sequence)
                    if rows is not None:
                        paused.setdefault(step + 3, []).append(rows)
            running_batch.resume(paused.pop(step, []))
            progress += running_batch.step() if running_batch.members else []
        for event in progress:
            if event.is_done:
                (number,) = (number for number, sequence in owner.items() if sequence is event.sequence)
                done[number] = list(event.sequence.ids)
        step += 1
    return done


@pytest.mark.parametrize("is_streaming", [True, False])
@pytest.mark.parametrize("kind", ["decoder", "encoder-decoder"])
def test_rows_join_leave_and_pause_between_replays(kind: str, is_streaming: bool, made: list[DecodingSlots]) -> None:
    module = tiny_decoder("original", seed=4) if kind == "decoder" else tiny_model("modern", seed=6, end_bonus=-9.0)
    draw = random.Random(7)
    arrivals = [draw.randrange(12) for _ in range(9)]
    leaving = {2: arrivals[2] + 3, 6: arrivals[6] + 1}
    expected = run_batch(lambda: RunningBatch(module), module, arrivals, leaving)
    size = SlotSize(8, 64, 32 if module.encoder else 0)
    recorded = run_batch(lambda: SlotBatch(module, size, needs_every_token=is_streaming), module, arrivals, leaving)
    assert recorded == expected and len(expected) == 7
    assert made[0].graphs.num_replays > 3


def test_a_pause_loses_no_end_of_another_row() -> None:
    """A pause reads the last step; the row that it ended is reported even if no row is left."""
    module, rows = tiny_decoder("original", seed=4, end_bonus=-9.0), []
    running_batch = SlotBatch(module, SlotSize(2, 64), needs_every_token=True)
    with torch.inference_mode():
        for limit in (4, 9):
            request = GenerateRequest([[BOS, 5]], GREEDY, EOS, PAD, (PAD, BOS))
            start = RequestStarter(module, request, [limit], with_text=False).start([0])
            rows += start.member.sequences
            running_batch.join([start])
        for _ in range(3):
            running_batch.step()
        assert running_batch.pause(rows[1]) is not None
        assert running_batch.members
        progress = running_batch.step()
    assert [event.sequence for event in progress if event.is_done] == [rows[0]] and not running_batch.members


def test_a_stream_stops_at_a_stop_text(made: list[DecodingSlots]) -> None:
    module = tiny_decoder("modern", seed=4)
    options = GenerateOptions(max_new_tokens=30, stop=("db",))
    request = dataclasses.replace(
        request_for(module, options, count=1), decode=lambda ids: "".join(chr(97 + index) for index in ids)
    )
    streams = []
    for devices in (("cpu",), ()):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(continuation, "SLOT_DEVICES", devices)
            stream, pieces = stream_ids(module, request), []
            while True:
                try:
                    pieces.append(next(stream))
                except StopIteration as end:
                    streams.append((pieces, end.value.ids, end.value.stop_reason, end.value.text))
                    break
    assert streams[0] == streams[1] and len(made) == 1


class Alternating(Constraint):
    """Allows the even ids, then the odd ids, in turn."""

    failure = None

    def __init__(self) -> None:
        self.count: int = 0

    def allowed_tokens(self) -> torch.Tensor:
        return torch.arange(13) % 2 == self.count % 2

    def take(self, token: int) -> None:
        self.count += 1


def test_a_constraint_chooses_with_the_host_after_a_replay(made: list[DecodingSlots]) -> None:
    """Rows with and without a constraint share the step of the model; alternatives are those of the same step."""
    module = tiny_decoder("modern", seed=4)
    free = request_for(module, GREEDY, count=2)
    held = dataclasses.replace(
        request_for(module, OPTIONS[1], count=3), constraint=Alternating, decode=lambda ids: "a" * len(ids)
    )
    results, noted = [], []
    for running_batch in (RunningBatch(module), SlotBatch(module, SlotSize(16, 64))):
        rows: list[GeneratedSequence] = []
        with torch.inference_mode():
            for request, count in ((free, 2), (held, 3)):
                limits = [request.options.max_new_tokens] * count
                starter = RequestStarter(module, request, limits, with_text=request is held)
                starts = [starter.start([number]) for number in range(count)]
                rows += [row for start in starts for row in start.member.sequences]
                rows[0].num_alternatives = 3
                running_batch.join(starts)
            while running_batch.members:
                running_batch.step()
        results.append([row.ids for row in rows])
        noted.append([[token for token, _ in best] for best in rows[0].alternatives])
    assert results[0] == results[1] and noted[0] == noted[1] and len(noted[0]) == len(results[0][0])
    assert all(token % 2 == place % 2 for ids in results[0][2:] for place, token in enumerate(ids))
    assert made[0].graphs.num_replays > 3


def test_rows_that_need_the_host_run_beside_the_slots(made: list[DecodingSlots]) -> None:
    """Beam searches, and rows longer than a slot, decode as in `RunningBatch`."""
    module = tiny_decoder("original", seed=4)
    search = GenerateOptions(max_new_tokens=9, beam_size=3, num_return_sequences=2)
    running_batch, collected = SlotBatch(module, SlotSize(4, 16)), []
    for options in (GREEDY, search, dataclasses.replace(GREEDY, max_new_tokens=40)):
        request = GenerateRequest([[BOS, 5, 6]], options, EOS, PAD, (PAD, BOS))
        starter = RequestStarter(module, request, [options.max_new_tokens], with_text=False)
        with torch.inference_mode():
            start = starter.start([0])
            collected.append((request, list(start.member.sequences)))
            running_batch.join([start])
    assert len(running_batch.members) == 3 and running_batch.num_rows == 5
    while running_batch.members:
        running_batch.step()
    for request, sequences in collected:
        expected = [continuation.ids for continuation in generate_ids(module, request)[0]]
        if isinstance(sequences[0], GeneratedSequence):
            assert [tuple(row.ids) for row in sequences] == expected
        else:
            assert [candidate.ids for candidate in sequences[0].candidates] == expected


def record_step(slots: DecodingSlots) -> list[tuple]:
    """Return the operations of a step with the shapes, strides and, of what persists, the addresses of its tensors."""
    recording = Recording()
    persistent = {
        tensor.untyped_storage().data_ptr()
        for tensor in (slots.cache.lengths_R, slots.chooser.tokens, slots.chooser.results, slots.logits_RV)
    }
    persistent |= {entry.buffer.untyped_storage().data_ptr() for entry in slots.cache.self_attention.values()}
    recording.record(lambda: (slots._compute_logits(), slots._choose()))

    def describe(value: object) -> object:
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage().data_ptr()
            return value.shape, value.stride(), value.data_ptr() if storage in persistent else None
        return [describe(item) for item in value] if isinstance(value, list | tuple) else value

    return [(str(func), describe(args), describe(list(kwargs.values())), describe(out))
            for func, args, kwargs, out in recording.calls]  # fmt: skip


def started(module: ch.Transformer, options: GenerateOptions = GREEDY) -> SlotBatch:
    """Return a batch in slots with three rows, after two steps."""
    request = request_for(module, options, count=3)
    starter = RequestStarter(module, request, [options.max_new_tokens] * 3, with_text=False)
    running_batch = SlotBatch(module, SlotSize(4, 64, 32 if module.encoder else 0))
    with torch.inference_mode():
        running_batch.join([starter.start([0, 1, 2])])
        running_batch.step()
        running_batch.step()
    return running_batch


@pytest.mark.parametrize("name", [name for name in GENERATING if "pre-grouped" in name])
def test_two_steps_are_the_same_operations_on_equal_addresses(name: str) -> None:
    running_batch = started(model(name), OPTIONS[2])
    assert running_batch.slots is not None
    with torch.inference_mode():
        first, second = record_step(running_batch.slots), record_step(running_batch.slots)
    assert len(first) > 50 and first == second


@pytest.mark.parametrize("name", GENERATING)
def test_a_step_never_reads_the_host(name: str) -> None:
    """Tensors of `meta` take the branches of a GPU, and have no values to read."""
    module = model(name)
    with_values = started(module, OPTIONS[2]).slots
    assert with_values is not None
    module.to("meta")
    ids, cache = torch.zeros(3, 5, dtype=torch.int64, device="meta"), IndexedCache()
    with torch.inference_mode():
        memory = module.encode(ids).memory if module.encoder is not None else None
        module.decode(ids, memory, cache=cache)
        slots = DecodingSlots(module, with_values.size, cache)
        slots.chooser.kind = with_values.chooser.kind
        slots.cache.use(4, 64, with_values.size.sources)
        slots._compute_logits()  # tables of positions are made in the first step, which is never recorded
        with refuse_host_reads():
            slots._compute_logits()
            slots._choose()


def test_a_recording_refuses_host_reads() -> None:
    numbers = torch.arange(3)
    for step in (
        lambda: numbers.sum().item(),
        lambda: numbers.nonzero(),
        lambda: numbers[numbers > 1],
        lambda: torch.tensor([1, 2]) + numbers[:2],
    ):
        with pytest.raises(HostRead):
            Recording().record(step)


def test_short_texts_are_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    record_steps(monkeypatch, least=32)
    monkeypatch.setattr(graph, "MOST_GRAPHS", 2)
    graphs, ran = Graphs(torch.device("cpu")), []
    numbers = torch.zeros(1)

    def step() -> None:
        ran.append(1)
        numbers.add_(1)

    for expected in (31, 31, 32, 32, 32):
        graphs.run("a", step, expected=expected)
    assert len(ran) == 3 and float(numbers) == 5 and graphs.num_replays == 2
    for key in ("b", "c", "b", "c"):
        graphs.run(key, step, expected=32)
    assert list(graphs._graphs) == ["b", "c"] and float(numbers) == 9


def test_later_batches_replay_the_recordings_of_earlier_ones(made: list[DecodingSlots]) -> None:
    module = replica(tiny_decoder("modern", seed=4))
    override(module, SlotOwner).idle = []
    request = request_for(module, GREEDY)
    first = generate_ids(module, request)
    replays = made[0].graphs.num_replays
    assert ids_of(generate_ids(module, request)) == ids_of(first)
    assert len(made) == 1 and made[0].graphs.num_replays > 2 * replays
    generate_ids(module, request_for(module, GREEDY, count=20))
    assert len(made) == 2 and module.idle == [made[1]]


def test_too_little_memory_ends_the_use_of_slots(
    made: list[DecodingSlots], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    module, tries = tiny_decoder("modern", seed=4), []

    def fail(*_: object) -> None:
        tries.append(1)
        raise torch.OutOfMemoryError("out of memory")

    request = request_for(module, GREEDY)
    expected = ids_of(generate_ids(module, request))
    monkeypatch.setattr(DecodingSlots, "__init__", fail)
    for _ in range(3):
        assert ids_of(generate_ids(module, request)) == expected
    assert len(tries) == 1
    assert [record.message for record in caplog.records] == [
        "steps of decoding run without CUDA graphs from now on: out of memory"
    ]


def test_models_that_cannot_be_recorded_say_why(made: list[DecodingSlots], monkeypatch: pytest.MonkeyPatch) -> None:
    module = tiny_decoder("modern", seed=4)
    assert eager_reason(module) == ""
    with clearhead.capture(module, "decoder.layers.0"):
        assert "captured or edited" in eager_reason(module)
        generate_ids(module, request_for(module, GREEDY))
    monkeypatch.setenv("CLEARHEAD_KERNELS", "plain")
    generate_ids(module, request_for(module, GREEDY))
    assert not made
