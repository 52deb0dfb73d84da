"""Plain FastAPI applications around other libraries, beside which `serve_load.py` measures `clearhead serve`.

python benchmarks/serve_peers.py THREADS embed MINILM PORT
python benchmarks/serve_peers.py THREADS translate CT2_FOLDER PORT SOURCE_SPM TOKENS
"""

from __future__ import annotations

import importlib.metadata
import logging
import sys
from typing import Any

import uvicorn
from fastapi import FastAPI


def embedding(folder: str, threads: int) -> FastAPI:
    """Embed by sentence-transformers, as its users write a server: one call for each request, in a pool of threads."""
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(threads)
    model, app = SentenceTransformer(folder, device="cpu"), FastAPI()

    @app.post("/v1/embeddings")
    def embeddings(request: dict[str, Any]) -> dict[str, Any]:
        texts = request["input"] if isinstance(request["input"], list) else [request["input"]]
        vectors = model.encode(texts, normalize_embeddings=True).tolist()
        return {"data": [{"index": index, "embedding": vector} for index, vector in enumerate(vectors)]}

    return app


def translation(folder: str, threads: int, pieces: str, length: int) -> FastAPI:
    """Translate by CTranslate2, which has threads of its own."""
    import ctranslate2
    import sentencepiece

    ctranslate2.set_log_level(logging.INFO)
    model = ctranslate2.Translator(folder, device="cpu", inter_threads=1, intra_threads=threads)
    reader, app = sentencepiece.SentencePieceProcessor(model_file=pieces), FastAPI()

    @app.post("/models/marian")
    def translate(request: dict[str, Any]) -> dict[str, Any]:
        tokens = [*reader.encode(request["inputs"], out_type=str), "</s>"]
        (result,) = model.translate_batch([tokens], beam_size=1, max_decoding_length=length, min_decoding_length=length)
        return {"translation_text": " ".join(result.hypotheses[0])}

    return app


def print_versions(threads: str, *libraries: str) -> None:
    """Print the versions, for the benchmark."""
    names = (*libraries, "torch", "fastapi", "uvicorn")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)
    print(f"system: {versions}, {threads} threads", flush=True)


if __name__ == "__main__":
    threads, kind, folder, port = sys.argv[1:5]
    if kind == "embed":
        print_versions(threads, "sentence-transformers", "transformers")
        answer = embedding(folder, int(threads))
    else:
        print_versions(threads, "ctranslate2", "sentencepiece")
        answer = translation(folder, int(threads), sys.argv[5], int(sys.argv[6]))
    uvicorn.run(answer, port=int(port), log_level="warning")
