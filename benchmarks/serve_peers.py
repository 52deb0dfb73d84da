"""Plain FastAPI applications around other libraries, beside which `serve_load.py` measures `clearhead serve`.

python benchmarks/serve_peers.py embed MINILM PORT
python benchmarks/serve_peers.py translate CT2_FOLDER PORT SOURCE_SPM TOKENS
"""

from __future__ import annotations

import sys
from typing import Any

import uvicorn
from fastapi import FastAPI


def embedding(folder: str) -> FastAPI:
    """Embed by sentence-transformers, as its users write a server: one call for each request, in a pool of threads."""
    from sentence_transformers import SentenceTransformer

    model, app = SentenceTransformer(folder, device="cpu"), FastAPI()

    @app.post("/v1/embeddings")
    def embeddings(asked: dict[str, Any]) -> dict[str, Any]:
        texts = asked["input"] if isinstance(asked["input"], list) else [asked["input"]]
        vectors = model.encode(texts, normalize_embeddings=True).tolist()
        return {"data": [{"index": index, "embedding": vector} for index, vector in enumerate(vectors)]}

    return app


def translation(folder: str, pieces: str, length: int) -> FastAPI:
    """Translate by CTranslate2, which has threads of its own."""
    import ctranslate2
    import sentencepiece

    model = ctranslate2.Translator(folder, device="cpu", inter_threads=1, intra_threads=2)
    reader, app = sentencepiece.SentencePieceProcessor(model_file=pieces), FastAPI()

    @app.post("/models/marian")
    def translate(asked: dict[str, Any]) -> dict[str, Any]:
        tokens = [*reader.encode(asked["inputs"], out_type=str), "</s>"]
        (found,) = model.translate_batch([tokens], beam_size=1, max_decoding_length=length, min_decoding_length=length)
        return {"translation_text": " ".join(found.hypotheses[0])}

    return app


if __name__ == "__main__":
    kind, folder, port = sys.argv[1:4]
    made = embedding(folder) if kind == "embed" else translation(folder, sys.argv[4], int(sys.argv[5]))
    uvicorn.run(made, port=int(port), log_level="warning")
