"""Texts that are hard to cut into pieces."""

TEXTS = (
    "Hello, world! It's 12345 o'clock.",
    "👩‍👩‍👧‍👦 👨🏽‍🚀 🧑🏿‍🤝‍🧑🏻 ❤️‍🔥 🏴‍☠️",  # families, skin tones, joiners, variation selectors
    "🇫🇷🇯🇵 🏴󠁧󠁢󠁳󠁣󠁴󠁿 1️⃣ #️⃣ ☕ 🤷",  # flags, tag sequences, keycaps
    "e\u0301a\u0300o\u0302 Z\u0351\u0343\u030c é ü ñ ﬁ",  # combining marks
    "你好,世界。日本語のテキスト 한국어 텍스트 𠜎𠜱",  # CJK, also beyond 16 bits
    "ภาษาไทย हिन्दी العربية עברית ქართული",
    "  two  spaces\n\n\tand\r\ntabs \u00a0 \u3000 end ",
    "def f(x):\n    return {'a': [1, 2], \"b\": x ** 2}\n",
    "x\u200by\u2060z\ufeff\u0000\u001b[0m \ufffd",
)
