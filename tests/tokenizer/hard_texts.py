"""Texts on which tokenizers have differed, and hypothesis strategies that make more."""

from __future__ import annotations

from hypothesis import strategies as st

HARD = [
    *("", " ", "  ", "\n", "\r\n", "\t", "a", " a", "a ", "  a  ", "Hi", " Hi", "  Hi", "\nHi"),
    # Runs of spaces and newlines, of every length up to a tab's worth and past the longest piece.
    *(f"{' ' * n}x{' ' * n}" for n in range(1, 40)),
    *(f"x{chr(10) * n}y" for n in range(1, 12)),
    "a \n b\t\tc \t d\r\n\r\ne\r f\v\fg\n \n  \n",
    "    if x:\n\treturn  x\n\n\n        # done\n",
    # Special strings typed as text.
    *("</s>Hi", "<s>", "<unk><s></s>", "<0x0A>", "<0x41>b", "[INST] a [/INST]", "<|endoftext|>"),
    "<|begin_of_text|>a<|eot_id|><|im_start|>user\n<|im_end|><|reserved_special_token_0|>",
    # Emoji: joiners, skin tones, flags, keycaps, a lone joiner, a tag sequence.
    "👨‍👩‍👧‍👦👩🏽‍🚀🏳️‍🌈🇨🇳🇺🇸1️⃣😀😀😀\u200d❤️🏴\U000e0067\U000e0062\U000e0065\U000e007f",
    # Han: common, rare, beyond the BMP, compatibility, radicals; kana, hangul whole and in parts.
    "却说曹操引军至赤壁。“善！”麤龘𠀀𪚥𰻝𱁬㐂豈⼀、中华人民共和国",
    "ひらがなカタカナｶﾀｶﾅ漢字々〆ヶ 한국어 조선말 \u1112\u1161\u11ab ㄱㄴㄷ",
    # Scripts with marks, right to left, without spaces.
    "مرحبا بالعالم، ١٢٣٤ — שָׁלוֹם עולם", "नमस्ते दुनिया क्षत्रिय १२३", "สวัสดีชาวโลก ๑๒๓ กรุงเทพฯ",
    "Привет, мир! Ёлка Ελληνικά Ωmega Հայերեն ქართული አማርኛ ខ្មែរ မြန်မာ",
    # Combining marks: composed and not, stacked, leading; ligatures, case that changes length.
    "é e\u0301 ệ e\u0323\u0302 Z\u0351\u036b\u0343 \u0301a ﬁ ß ẞ İ ı ſ Å Å ŉ ǅ",
    # What looks like nothing: NBSP, thin and ideographic spaces, zero width, BOM, soft hyphen.
    "a\u00a0b\u2009c\u3000d\u200be\u200cf\ufeffg\u00adh\u2028i\u2029j\u0085k\u180el",
    *("\ufeffstart", "\u202eright to left\u202c", "\u2581\u2581a \u2581b", "\ufffd\ufffc\uffff"),
    # Control characters, alone and together.
    *(chr(code) for code in range(32)), "\x7f", "".join(map(chr, range(0x20))), "a\0b\x1b[31mc",
    # Numbers.
    "0 1 12 123 1234 12345 123456 1,234,567.89 -1e-10 0x1F ½ ² ⅷ ٣ 〇一二 1a2b 3D v1.2.3",
    # Contractions in either case, and with another apostrophe.
    "I'm you're he's DON'T we'll I'D y'all'd've can’t 'tis 's'S'ſ 'reX",
    # Code, markup, addresses.
    "def f(x: int = 0) -> str:\n    return f'{x!r:>8}' if x % 2 == 0 else \"\\n\"  # 注释\n",
    "for(int i=0;i<n;++i){a[i]^=b[i]>>1;}//==>!=&&||::",
    '{"a":[1,2.5e3,null],"b":"\\u00e9"}\n<p class="x">&nbsp;</p>\n$\\frac{a}{b}$ ```py\n```',
    "https://例え.jp/路径?q=a%20b&x=1#片段 user.name+tag@sub.example.co.uk C:\\Users\\名\\f.txt",
    # Mixed, long, repeated.
    "The模型model看attention注意力2026年3月🌏。and更more—“quotes” «…» ‘x’ 「の」",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", "=" * 80, "-" * 33, "。" * 20, "哈" * 50,
    "antidisestablishmentarianism Donaudampfschifffahrtsgesellschaft llanfairpwllgwyngyll",
]  # fmt: skip

# Any character, but often those between which tokenizers decide. Not those that no version of
# Unicode has yet: engines know different versions.
any_texts = st.text(
    st.sampled_from("ab'sS1 2\n\r\t\u00a0\u3000。，曹操é\u0301😀\u200d▁<>|/-_\0½ⅷ")
    | st.characters(codec="utf-8", max_codepoint=0xFFFF, exclude_categories=["Cn"])
    | st.characters(codec="utf-8", exclude_categories=["Cn"])
) | st.lists(st.sampled_from(HARD), max_size=3).map("".join)
# Those that a SentencePiece vocabulary gives back: it cannot tell ▁ from a space.
without_bar = any_texts.map(lambda text: text.replace("▁", "_"))
