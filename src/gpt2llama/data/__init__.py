"""The data room: text becomes documents, token shards, then packed batches.

documents.py  files and folders → documents, checked and unchanged
shards.py     the file format: tokens of many documents in one memory-mapped safetensors file
prepare.py    documents → a folder of shards, with a held-out split
leaks.py      held-out windows that also stand in the training tokens
batches.py    a folder of shards → resumable batches, and held-out windows (the only one with torch)
"""
