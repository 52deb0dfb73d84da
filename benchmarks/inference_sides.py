"""One side of `inference_speed.py` in its own process; it imports its libraries when it prepares its work.

python benchmarks/inference_sides.py JOB    # as inference_speed.py starts it
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import Any

from inference_cases import Job, read_tokens
from side_by_side import Run, Work, serve

END = 50256


def of_clearhead(job: Job) -> Work:
    import torch

    import clearhead as ch
    from clearhead.version import __version__

    torch.set_num_threads(job.threads)
    model = ch.load(job.folder, device=job.device, precision=job.precision)
    system = f"{system_of_torch('clearhead', __version__)}, {job.precision}"
    if job.kind == "embed":
        return Work(partial(model.embed, job.texts, batch_size=job.batch_size), None, system)
    if job.kind == "translate":
        keys = {"beam_size": job.rows_and_beams[1], "max_length": job.new_tokens}
        check_sizes(job, map(model.special_tokens.for_source, model.tokenizers.source.encode_batch(job.texts)))
        return Work(partial(model.translate, job.texts, **keys), translation_by_ids(job, model), system)
    count = job.new_tokens
    keys: dict[str, Any] = {"max_new_tokens": count, "min_new_tokens": count, "batch_size": len(job.texts)}
    keys |= {"temperature": 0} if job.top_p is None else {"top_p": job.top_p}
    prompts = model.tokenizers.target.encode_batch(job.texts)
    check_sizes(job, prompts)
    return Work(partial(model.generate, job.texts, **keys), generation_by_ids(prompts, keys, model), system)


def translation_by_ids(job: Job, model: Any) -> Run:
    from clearhead.generate.continuation import GenerateRequest, generate_ids
    from clearhead.generate.options import SearchOptions

    search = SearchOptions(beam_size=job.rows_and_beams[1], max_length=job.new_tokens, min_length=job.new_tokens)
    affixes, pad = model.special_tokens, model.tokenizers.source.pad_id
    sources = [affixes.for_source(ids) for ids in model.tokenizers.source.encode_batch(job.texts)]
    start = affixes.for_target([])[0]
    prompts = [[start]] * len(sources)
    request = GenerateRequest(prompts, search, eos_id=0, pad_id=pad, banned=(start, pad), sources=sources)
    return lambda: generate_ids(model.runner.tree(), request)


def generation_by_ids(prompts: list[list[int]], keys: dict[str, Any], model: Any) -> Run:
    from clearhead.generate.continuation import GenerateRequest, generate_ids
    from clearhead.generate.options import GenerateOptions

    request = GenerateRequest(prompts, GenerateOptions(**keys), eos_id=END, pad_id=END)
    return lambda: generate_ids(model.runner.tree(), request)


def of_transformers(job: Job) -> Work:
    import torch
    import transformers

    torch.set_num_threads(job.threads)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[job.precision]
    kinds = {"embed": transformers.AutoModel, "translate": transformers.MarianMTModel}
    module = kinds.get(job.kind, transformers.GPT2LMHeadModel).from_pretrained(job.folder, dtype=dtype).eval()
    module = module.to(job.device)
    tokenizer, system = (
        transformers.AutoTokenizer.from_pretrained(job.tokenizer),
        system_of_torch("transformers", transformers.__version__),
    )
    if job.kind == "embed":
        called = torch.compile(module, dynamic=True) if job.compiled else module
        return Work(embedding_of_transformers(job, called, tokenizer), None, system)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    check_sizes(job, tokenizer(job.texts).input_ids)
    beams = job.rows_and_beams[1] if job.kind == "translate" else 1
    keys = {"max_new_tokens": job.new_tokens, "min_new_tokens": job.new_tokens, "num_beams": beams, "do_sample": False}
    if job.top_p is not None:
        keys |= {"do_sample": True, "top_p": job.top_p, "top_k": 0}
    if job.compiled:
        # As its guide advises: a static cache has fixed shapes, so that a step is compiled once. On a GPU `generate`
        # compiles it.
        if job.device == "cpu":
            module.forward = torch.compile(module.forward)
        keys["cache_implementation"] = "static"

    def run() -> None:
        batch = tokenizer(job.texts, padding=True, return_tensors="pt").to(job.device)
        tokenizer.batch_decode(module.generate(**batch, **keys), skip_special_tokens=True)

    return Work(run, None, system)


def of_sentence_transformers(job: Job) -> Work:
    import sentence_transformers
    import torch

    torch.set_num_threads(job.threads)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[job.precision]
    model = sentence_transformers.SentenceTransformer(job.folder, device=job.device, model_kwargs={"dtype": dtype})
    keys = {"batch_size": job.batch_size or 64, "normalize_embeddings": True, "show_progress_bar": False}
    return Work(
        partial(model.encode, job.texts, **keys),
        None,
        system_of_torch("sentence-transformers", sentence_transformers.__version__),
    )


def of_ctranslate2(job: Job) -> Work:
    os.environ.setdefault("CT2_VERBOSE", "1")  # the library prints the instructions that it uses
    import ctranslate2
    import transformers

    keys = {"device": "cpu", "inter_threads": 1, "intra_threads": job.threads}
    keys["compute_type"] = {"fp32": "float32", "int8": "int8"}[job.precision]
    types = " ".join(sorted(ctranslate2.get_supported_compute_types("cpu")))
    system = f"ctranslate2 {ctranslate2.__version__}, {job.threads} threads, {keys['compute_type']} of {types}"
    if job.kind == "embed":
        return Work(embedding_of_ctranslate2(job, ctranslate2.Encoder(job.folder, **keys)), None, system)
    tokenizer = transformers.AutoTokenizer.from_pretrained(job.tokenizer)
    check_sizes(job, tokenizer(job.texts).input_ids)
    count, model = job.new_tokens, None
    if job.kind == "translate":
        lengths = {"min_decoding_length": count, "max_decoding_length": count, "beam_size": job.rows_and_beams[1]}
        model = partial(ctranslate2.Translator(job.folder, **keys).translate_batch, **lengths)
    else:
        lengths = {"min_length": count, "max_length": count, "include_prompt_in_result": False, "beam_size": 1}
        model = partial(ctranslate2.Generator(job.folder, **keys).generate_batch, **lengths)

    def run() -> None:
        # As its guide shows for the tokenizers of transformers.
        tokens = [tokenizer.convert_ids_to_tokens(tokenizer.encode(text)) for text in job.texts]
        for output in model(tokens):
            best = output.hypotheses[0] if job.kind == "translate" else output.sequences[0]
            tokenizer.decode(tokenizer.convert_tokens_to_ids(best), skip_special_tokens=True)

    return Work(run, None, system)


def embedding_of_ctranslate2(job: Job, encoder: Any) -> Run:
    import numpy
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(f"{job.tokenizer}/tokenizer.json")
    tokenizer.no_padding()
    texts = sorted(job.texts, key=len)

    def run() -> None:
        for start in range(0, len(texts), 64):
            ids = [encoding.ids for encoding in tokenizer.encode_batch(texts[start : start + 64])]
            hidden = numpy.array(encoder.forward_batch(ids).last_hidden_state)
            mask = numpy.arange(hidden.shape[1]) < numpy.array([[len(row)] for row in ids])
            vectors = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)
            vectors /= numpy.linalg.norm(vectors, axis=-1, keepdims=True)

    return run


def of_llama(job: Job) -> Work:
    import llama_cpp

    model = llama_cpp.Llama(
        job.folder, n_ctx=1024, n_batch=512, n_threads=job.threads, n_threads_batch=job.threads, verbose=False
    )

    def encode(text: str) -> list[int]:
        ids: list[int] = model.tokenize(text.encode(), add_bos=False)
        return ids

    check_sizes(job, map(encode, job.texts))

    def run() -> None:
        for text in job.texts:
            model.reset()
            tokens = list(islice(model.generate(encode(text), top_k=1, temp=0.0, repeat_penalty=1.0), job.new_tokens))
            model.detokenize(tokens)
            assert len(tokens) == job.new_tokens

    system = llama_cpp.llama_print_system_info().decode().strip()
    return Work(run, None, f"llama-cpp-python {llama_cpp.__version__}, {job.threads} threads: {system}")


def embedding_of_transformers(job: Job, module: Callable[..., Any], tokenizer: Any) -> Run:
    """Return a function that embeds texts like typical user code: sorted, in batches of 64, mean, length 1."""
    import torch

    texts = sorted(job.texts, key=len)

    @torch.inference_mode()
    def run() -> None:
        for start in range(0, len(texts), 64):
            batch = tokenizer(texts[start : start + 64], padding=True, truncation=True, return_tensors="pt")
            hidden, mask = module(**batch).last_hidden_state, batch["attention_mask"][..., None]
            torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1).float().numpy()

    return run


def system_of_torch(library: str, version: str) -> str:
    """Return the version of a library that uses PyTorch, and PyTorch's threads and instructions."""
    import torch

    system = f"{torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"
    return f"{library} {version}, torch {torch.__version__}, {system}"


def check_sizes(job: Job, sequences: Any) -> None:
    """Refuse texts whose number of tokens differs from the case, since sides would do different work."""
    sizes = {len(ids) for ids in sequences}
    assert sizes == {read_tokens(job.case)}, f"texts of {sizes} tokens, not {read_tokens(job.case)}"


SIDES = {
    "clearhead": of_clearhead, "transformers": of_transformers, "sentence-transformers": of_sentence_transformers,
    "CTranslate2": of_ctranslate2, "llama.cpp": of_llama,
}  # fmt: skip

if __name__ == "__main__":
    job = Job.from_json(sys.argv[1])
    serve(partial(SIDES[job.library], job))
