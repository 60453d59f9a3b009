"""What a model can do, in figures with intervals.

tasks.py    questions of a JSONL file, answered greedily and scored; golden answers
scoring.py  log-probabilities of given continuations
judge.py    another model as the judge, through any OpenAI-compatible endpoint
lm_eval.py  the tasks of lm-eval (an extra)
shares.py   counts as shares with an interval
"""
