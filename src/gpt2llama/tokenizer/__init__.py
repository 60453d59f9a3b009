"""Text to ids and back, behind one protocol.

protocol.py  what every tokenizer can do
bpe.py       byte-level BPE, ours or another's tokenizer.json, and how ours is trained
load.py      from what lies on disk to a tokenizer
stream.py    ids to text one by one, no character torn
"""

from .bpe import BPETokenizer, train_bpe
from .load import load_tokenizer
from .protocol import Tokenizer
from .stream import StreamDecoder, split_pieces

__all__ = [
    "BPETokenizer",
    "StreamDecoder",
    "Tokenizer",
    "load_tokenizer",
    "split_pieces",
    "train_bpe",
]
