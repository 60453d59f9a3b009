"""From a text continuer to an assistant, on the one trainer.

lora.py        beside frozen matrices, thin ones that alone learn
examples.py    conversations in the usual JSONL shapes → token ids, and which of them are learned
packing.py     examples side by side in rows, none of which sees another
instruct.py    a run: conversations in, a model that answers out
assistant.py   the data set of the small assistant, and how well it is answered
distill.py     a larger model's probabilities to learn from
top_k.py       its likeliest tokens, written once
teacher_answers.py  what it says to prompts, as conversations
run.py         what every stage's run is
"""
