"""One side of `inference_speed.py`, in its own process: its libraries are imported when it prepares its work.

python benchmarks/inference_sides.py JOB    # as inference_speed.py starts it
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from inference_cases import TARGET, VOCABULARY, Job
from side_by_side import Run, serve

END = 50256


def of_clearhead(job: Job) -> Run:
    import torch

    import clearhead as ch
    from clearhead.generate.continuation import GenerateRequest, generate_ids
    from clearhead.generate.options import GenerateOptions, SearchOptions
    from clearhead.generate.translation import translate_ids

    torch.set_num_threads(job.threads)
    model = ch.load(job.folder, device="cpu", precision=job.precision)
    if job.kind == "embed":
        return partial(model.embed, job.sentences())
    if job.kind == "translate":
        search = SearchOptions(beam_size=job.rows_and_beams[1], max_length=TARGET, min_length=TARGET)
        start = model.tokenizers.target.special_tokens.for_target([])[0]
        sources, pad = job.sources(), VOCABULARY - 1
        return lambda: translate_ids(model.module, sources, bos_id=start, eos_id=0, pad_id=pad, options=search)
    prompts, count = job.prompts()
    options = GenerateOptions(max_new_tokens=count, min_new_tokens=count, temperature=0, batch_size=len(prompts))
    request = GenerateRequest(prompts, options, eos_id=END, pad_id=END)
    return lambda: generate_ids(model.module, request)


def of_transformers(job: Job) -> Run:
    import torch
    import transformers

    torch.set_num_threads(job.threads)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[job.precision]
    kinds = {"embed": transformers.AutoModel, "translate": transformers.MarianMTModel}
    module = kinds.get(job.kind, transformers.GPT2LMHeadModel).from_pretrained(job.folder, dtype=dtype).eval()
    if job.kind == "embed":
        return embedding_of_transformers(job, torch.compile(module, dynamic=True) if job.compiled else module)
    if job.kind == "translate":
        prompts, count, beams = job.sources(), TARGET, job.rows_and_beams[1]
    else:
        (prompts, count), beams = job.prompts(), 1
    ids = torch.tensor(prompts)
    keys = {"max_new_tokens": count, "min_new_tokens": count, "num_beams": beams, "do_sample": False}
    if job.compiled:
        # What its guide advises: the shapes of a static cache do not change, so that a step is compiled once.
        module.forward = torch.compile(module.forward)
        keys["cache_implementation"] = "static"
    return lambda: module.generate(ids, attention_mask=torch.ones_like(ids), **keys)


def of_sentence_transformers(job: Job) -> Run:
    import sentence_transformers
    import torch

    torch.set_num_threads(job.threads)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[job.precision]
    model = sentence_transformers.SentenceTransformer(job.folder, device="cpu", model_kwargs={"dtype": dtype})
    sentences = job.sentences()
    return lambda: model.encode(sentences, batch_size=64, normalize_embeddings=True, show_progress_bar=False)


def of_ctranslate2(job: Job) -> Run:
    import ctranslate2

    keys = {"device": "cpu", "inter_threads": 1, "intra_threads": job.threads}
    keys["compute_type"] = {"fp32": "float32", "int8": "int8"}[job.precision]
    if job.kind == "embed":
        return embedding_of_ctranslate2(job, ctranslate2.Encoder(job.folder, **keys))
    known = json.loads(Path(job.folder, "ids.json").read_text("utf-8"))
    tokens_of = {index: token for token, index in known.items()}
    rows, count = (job.sources(), TARGET) if job.kind == "translate" else job.prompts()
    tokens = [[tokens_of[index] for index in row] for row in rows]
    if job.kind == "translate":
        lengths = {"min_decoding_length": count, "max_decoding_length": count}
        translator = ctranslate2.Translator(job.folder, **keys)
        return partial(translator.translate_batch, tokens, beam_size=job.rows_and_beams[1], **lengths)
    lengths = {"min_length": count, "max_length": count, "include_prompt_in_result": False}
    generator = ctranslate2.Generator(job.folder, **keys)
    return partial(generator.generate_batch, tokens, beam_size=1, **lengths)


def embedding_of_ctranslate2(job: Job, encoder: Any) -> Run:
    import numpy
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(Path(job.folder, "tokenizer.json")))
    tokenizer.no_padding()
    texts = sorted(job.sentences(), key=len)

    def run() -> None:
        for start in range(0, len(texts), 64):
            ids = [found.ids for found in tokenizer.encode_batch(texts[start : start + 64])]
            hidden = numpy.array(encoder.forward_batch(ids).last_hidden_state)
            mask = numpy.arange(hidden.shape[1]) < numpy.array([[len(row)] for row in ids])
            vectors = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)
            vectors /= numpy.linalg.norm(vectors, axis=-1, keepdims=True)

    return run


def of_llama(job: Job) -> Run:
    import llama_cpp

    prompts, count = job.prompts()
    model = llama_cpp.Llama(
        job.folder, n_ctx=1024, n_batch=512, n_threads=job.threads, n_threads_batch=job.threads, verbose=False
    )

    def run() -> None:
        for prompt in prompts:
            model.reset()
            tokens = islice(model.generate(prompt, top_k=1, temp=0.0, repeat_penalty=1.0), count)
            assert len(list(tokens)) == count

    return run


def embedding_of_transformers(job: Job, module: Callable[..., Any]) -> Run:
    """Return the embedding of texts as users of an encoder write it: sorted, in batches of 64, mean, length 1."""
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(job.folder)
    texts = sorted(job.sentences(), key=len)

    @torch.inference_mode()
    def run() -> None:
        for start in range(0, len(texts), 64):
            batch = tokenizer(texts[start : start + 64], padding=True, truncation=True, return_tensors="pt")
            hidden, mask = module(**batch).last_hidden_state, batch["attention_mask"][..., None]
            torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1).float().numpy()

    return run


SIDES = {
    "clearhead": of_clearhead, "transformers": of_transformers, "sentence-transformers": of_sentence_transformers,
    "CTranslate2": of_ctranslate2, "llama.cpp": of_llama,
}  # fmt: skip

if __name__ == "__main__":
    job = Job.from_json(sys.argv[1])
    serve(partial(SIDES[job.library], job))
