"""Record the answers of the question-answering pipeline that transformers 5 removed, for a test.

The pipeline needs transformers 4.57, so the script runs in its own environment:

    python -m venv qa && qa/bin/pip install torch numpy "transformers==4.57.*"
    qa/bin/python benchmarks/record_answers.py tests/tasks/answer/recorded_answers.json

The models are tiny, and their weights are drawn from their names: tests/tasks/answer/recorded_pipeline.py.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import transformers

from tests.tasks.answer.recorded_pipeline import MODELS, POSITIONS, QUESTION, cases, write


def record(folder: Path, model_type: str) -> list[dict[str, object]]:
    """Return each case with the answers of the pipeline, best first."""
    write(folder, model_type)
    pipeline = transformers.pipeline("question-answering", model=str(folder), tokenizer=str(folder), device="cpu")
    rows = []
    for case in cases():
        answers = pipeline(question=QUESTION, max_seq_len=POSITIONS, **case)
        listed = answers if isinstance(answers, list) else [answers]
        rows.append({**case, "answers": [{**row, "score": float(f"{row['score']:.7g}")} for row in listed]})
    return rows


def main() -> None:
    """Write the record as JSON into the file that the command line names."""
    records = {}
    for model_type in MODELS:
        with tempfile.TemporaryDirectory() as folder:
            records[model_type] = record(Path(folder), model_type)
    tables = ",\n".join(f'"{name}": [\n' + ",\n".join(map(json.dumps, rows)) + "\n]" for name, rows in records.items())
    content = f'{{"transformers": "{transformers.__version__}", "records": {{\n{tables}\n}}}}\n'
    Path(sys.argv[1]).write_text(content, encoding="utf-8")


if __name__ == "__main__":
    main()
