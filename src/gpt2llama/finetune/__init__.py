"""From a text continuer to an assistant, on the one trainer.

examples.py  conversations in the usual JSONL shapes → token ids, and which of them are learned
packing.py   examples side by side in rows, none of which sees another
instruct.py  a run: conversations in, a model that answers out
"""
