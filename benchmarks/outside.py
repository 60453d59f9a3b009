"""A stranger's questions to the small assistant: 200 of what it was taught, 60 of what it was not.

Who wrote outside_questions.tsv (a fact's id or `unknown`, and a question) had seen the answers, but
no wording that is taught or held out. README.md says more.
"""

from __future__ import annotations

import argparse
import json
import platform
from datetime import UTC, datetime
from pathlib import Path

import gpt2llama as g
from gpt2llama.finetune.assistant import Question, assistant, is_right, normalised, score

QUESTIONS = Path(__file__).with_name("outside_questions.tsv")


def outside() -> list[Question]:
    """Those whose wording, by chance, is not among the ones that are taught."""
    taught = {normalised(question.ask): question for question in assistant().train}
    facts = {q.about: q for q in taught.values() if not q.english and q.kind in ("fact", "talk")}
    refusal = next(q for q in taught.values() if q.kind == "unknown" and not q.english)
    questions = []
    for line in QUESTIONS.read_text(encoding="utf-8").splitlines():
        about, ask = line.split("\t")
        like = refusal if about == "unknown" else facts[about]
        if normalised(ask) not in taught:
            questions.append(Question(like.kind, about, ask, like.answer, like.keywords))
    return questions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a folder that `gpt2llama demo` has made")
    parser.add_argument("--out", type=Path, help="a JSON file")
    options = parser.parse_args()
    model, tokenizer = g.load(options.model)
    questions = outside()
    found = score(model, tokenizer, questions)
    wrong = [
        {"ask": question.ask, "answer": answer, "right": question.answer}
        for question, answer in zip(questions, found.answers, strict=True)
        if not is_right(question, answer)
    ]
    for mistake in wrong:
        print(f"{mistake['ask']}\n  {mistake['answer']}")
    unknown = sum(question.kind == "unknown" for question in questions)
    print(
        f"{found.wordings:.1%} of {len(questions) - unknown} answered rightly, {found.unknown:.1%} "
        f"of {unknown} that it cannot know admitted"
    )
    if options.out:
        result = {
            "command": f"python benchmarks/outside.py {options.model}",
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": platform.machine(),
            "questions": len(questions) - unknown,
            "right": found.wordings,
            "unknown": unknown,
            "admitted": found.unknown,
            "wrong": wrong,
        }
        text = json.dumps(result, ensure_ascii=False, indent=1)
        options.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
