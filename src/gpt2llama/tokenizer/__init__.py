"""Text to ids and back, behind one protocol.

protocol.py       what every tokenizer can do
bpe.py            BPE of GPT-2's and of SentencePiece's style, and how ours is trained
splits.py         how a text is cut into words before byte-level BPE
merges.py         the merges of a vocabulary that lists only its pieces
load.py           from what lies on disk to a tokenizer
sentencepiece.py  Llama 1's, Llama 2's and Mistral's tokenizer.model
tiktoken.py       Llama 3's tokenizer.model
facts.py          what the file says, without building it
gguf.py           the tokenizer inside a GGUF file, both ways
stream.py         ids to text one by one, no character torn
"""

from .bpe import BPETokenizer, train_bpe
from .facts import Facts, facts_of, facts_of_gguf, read_facts
from .gguf import tokenizer_from_gguf, tokenizer_to_gguf
from .load import TOKENIZER_FILES, has_tokenizer, load_tokenizer
from .protocol import Tokenizer
from .stream import StreamDecoder, split_pieces

__all__ = [
    "TOKENIZER_FILES",
    "BPETokenizer",
    "Facts",
    "StreamDecoder",
    "Tokenizer",
    "facts_of",
    "facts_of_gguf",
    "has_tokenizer",
    "load_tokenizer",
    "read_facts",
    "split_pieces",
    "tokenizer_from_gguf",
    "tokenizer_to_gguf",
    "train_bpe",
]
