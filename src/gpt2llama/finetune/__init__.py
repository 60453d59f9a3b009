"""From a text continuer to an assistant, on the one trainer.

lora.py        beside frozen matrices, thin ones that alone learn
examples.py    conversations in the usual JSONL shapes → token ids, and which of them are learned
packing.py     examples side by side in rows, none of which sees another
instruct.py    a run: conversations in, a model that answers out
assistant.py   the data set of the small assistant, and how well it is answered
preference.py  pairs of answers, of which one is preferred: DPO, IPO, SimPO
reward.py      answers of the model's own, by rewards that can be checked: GRPO
answers.py     prompts and answers as padded rows, and how likely a model finds them
settings.py    the settings of these two as TOML and key=value
run.py         what every stage's run is
"""
