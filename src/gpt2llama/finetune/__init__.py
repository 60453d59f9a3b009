"""From a text continuer to an assistant, on the one trainer.

lora.py             beside frozen matrices, thin ones that alone learn
examples.py         conversations in the usual JSONL shapes → token ids, and which are learned
packing.py          examples side by side in rows, none of which sees another
instruct.py         a run: conversations in, a model that answers out
assistant.py        the data set of the small assistant, and how well it is answered
labelled.py         texts and labels, without copies, and split so that the held-out ones are news
classify.py         a run: labelled texts in, a scored classifier out
classifier.py       the head on the last real token; from and to disk
scores.py           accuracy, precision, recall, calibration
preference.py       a run: of two answers the better one (DPO, IPO, SimPO)
reward.py           a run: of several answers those with the higher reward (GRPO)
rollouts.py         the prompts, and the groups of answers that the policy samples to them
rewards.py          what an answer is worth: a sum, a form, a function of the user's
grpo.py             the objective on groups of answers
answers.py          prompts, answers and their log-probabilities, for preferences and rewards
distill.py          a run: a student learns from a teacher's distributions
top_k.py            the teacher's likeliest tokens, stored once
teacher_answers.py  a teacher's answers to prompts, as conversations to learn from
settings.py, run.py  what every stage's run is
"""
