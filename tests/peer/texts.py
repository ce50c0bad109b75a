"""What the peers are asked to tokenize and to predict."""

import itertools
import random
from pathlib import Path

PASSAGE = Path(__file__).with_name("passage.txt").read_text()

WORDS = (
    "Hello", "world", "don't", "I'LL", "it's", "naïve", "Straße", "ΑΒΓδε", "привет", "Мир", "漢字",
    "かな", "カナ", "한국어", "العربية", "עברית", "हिन्दी", "ไทย", "Việt", "ı̇İ", "ﬁne", "ﬀ", "x²",
    "½", "٣٤", "१२", "Ⅻ", "①",
)  # fmt: skip
NUMBERS = ("0", "7", "42", "123", "1234", "12345678", "3.14159", "1e-7", "0xDEADBEEF", "1,000,000")
SPACES = (
    " ", "  ", "   ", "\t", "\t\t", "\n", "\n\n", "\r\n", " \n", "\n ", "\u00a0", "\u3000",
    "\u2003", "\u200b", "\u2028", "\x0b", "\x0c", "\x85",
)  # fmt: skip
EMOJI = ("🦙", "👩🏽‍🚀", "🇳🇴", "❤️", "🏴󠁧󠁢󠁳󠁣󠁴󠁿", "👨‍👩‍👧‍👦", "☃", "🤷‍♀️")
CODE = (
    "for (int i = 0; i < n; ++i) { a[i] <<= 2; }",
    "\tif x is None:\n\t\treturn {'k': [1, 2]}\n",
    "SELECT * FROM t WHERE a <> 'b' -- c",
    '<div class="a">&nbsp;</div>',
    "#!/bin/sh\nset -eu; echo \"$1\" | sed 's/\\//_/g'\n",
    *("f(x)=\\frac{1}{2}\\sum_{i=0}^{n} x_i", "https://example.org/a?b=c&d=%20#e"),
    *("user.name+tag@example.co.uk", "C:\\path\\to\\file.txt", "==== ---- //// **** ____ ...."),
)
MARKS = (
    "!", "?!", "...", "—", "“quoted”", "'", "''", '"', "`", "(", "))", "¿", "、", "。", "€", "№",
)  # fmt: skip
CONTROL = (
    "<s>", "</s>", "<unk>", "<bos>", "<eos>", "<pad>", "<|im_start|>", "<|im_end|>",
    "<|endoftext|>", "<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|turn>", "<turn|>",
    "<0x0A>", "<0xFF>", "[INST]", "<think>", "</think>", "<|im_start", "im_end|>", "▁", "Ġ",
)  # fmt: skip
EDGES = (
    "\x00", "a\x00b", "\x01\x02", "\x7f", "\ufeffbom", "\ufffd", "\ue000", "\U0010fffd", "é",
    "e\u0301", "a" * 300, " " * 40, "\n" * 20, "ab" * 100,
)  # fmt: skip


def varied_texts() -> list[str]:
    """Over 200 different strings, the same every time."""
    plain = [*WORDS, *NUMBERS, *SPACES, *EMOJI, *CODE, *MARKS, *CONTROL, *EDGES]
    texts = [*plain, *(f" {text}" for text in plain[::3]), *(f"{text} " for text in plain[1::3])]
    between = itertools.cycle(SPACES)
    texts += [f"{a}{next(between)}{b}" for a, b in itertools.pairwise(WORDS)]
    texts += [f"<|im_start|>user\n{text}<|im_end|>\n" for text in (*CODE, *CONTROL)]
    texts += PASSAGE.splitlines(keepends=True)
    choose = random.Random(20)
    for _ in range(80):
        texts.append("".join(choose.choices(plain, k=choose.randrange(2, 12))))
    return list(dict.fromkeys(texts))
