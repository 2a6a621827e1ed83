"""Normalisation of written text for speech: lower-case words and the marks `,` `.` `?`."""

from __future__ import annotations

import importlib
import re
import unicodedata
from collections.abc import Iterable, Iterator
from typing import Any

from mmfast.core.errors import MmfastError

SPELLINGS = {
    "color": "colour", "colors": "colours", "favorite": "favourite", "gray": "grey",
    "center": "centre", "meter": "metre", "meters": "metres", "ok": "okay", "hi": "hello",
}  # fmt: skip
SHORT = {
    "mr.": "mister", "mrs.": "missus", "ms.": "miss", "dr.": "doctor", "vs.": "versus",
    "etc.": "and so on", "e.g.": "for example", "i.e.": "that is", "approx.": "about",
    "no.": "number", "a.m.": "a m", "p.m.": "p m",
}  # fmt: skip
CONTRACTIONS = {
    "can't": "can not", "cannot": "can not", "won't": "will not", "shan't": "shall not",
    "let's": "let us", "i'm": "i am",
}  # fmt: skip
# Endings of contractions; 's is "is" after these words alone, elsewhere it may be a possessive.
ENDINGS = {"n't": "not", "'re": "are", "'ll": "will", "'ve": "have", "'d": "would"}
IS = {"it", "that", "what", "there", "here", "he", "she", "who", "where", "how", "when", "this"}
UNITS = {
    "%": ("percent", "percent"), "‰": ("per mille", "per mille"),
    "°c": ("degree celsius", "degrees celsius"), "°f": ("degree fahrenheit", "degrees fahrenheit"),
    "°": ("degree", "degrees"), "km/h": ("kilometre per hour", "kilometres per hour"),
    "m/s": ("metre per second", "metres per second"), "km": ("kilometre", "kilometres"),
    "cm": ("centimetre", "centimetres"), "mm": ("millimetre", "millimetres"),
    "m": ("metre", "metres"), "kg": ("kilogram", "kilograms"), "g": ("gram", "grams"),
    "ms": ("millisecond", "milliseconds"), "s": ("second", "seconds"), "sec": ("second", "seconds"),
    "min": ("minute", "minutes"), "h": ("hour", "hours"), "hz": ("hertz", "hertz"),
    "khz": ("kilohertz", "kilohertz"), "mb": ("megabyte", "megabytes"),
    "gb": ("gigabyte", "gigabytes"), "px": ("pixel", "pixels"),
    "fps": ("frame per second", "frames per second"), "x": ("times", "times"), "am": ("a m", "a m"),
    "pm": ("p m", "p m"),
}  # fmt: skip
COINS = {"$": ("dollar", "dollars"), "€": ("euro", "euros"), "£": ("pound", "pounds")}
SIGNS = {
    "+": "plus", "=": "is", "\u00d7": "times", "*": "times", "÷": "divided by", "/": "slash",
    "&": "and", "@": "at", "#": "number", "%": "percent", "<": "less than", ">": "greater than",
    "°": "degrees", **{sign: plural for sign, (_, plural) in COINS.items()},
}  # fmt: skip
# Between two numbers, without their spaces and with them.
BETWEEN = {
    "-": ("to", "minus"), "\u2013": ("to", "to"), "/": ("slash", "divided by"),
    "x": ("times", "times"),
}  # fmt: skip
DASH = "\u2014"
PAUSES = {"!": ".", "\u2013": ","} | dict.fromkeys(f";:()[]{DASH}", ",")
ALIKE = {0x2018: "'", 0x2019: "'", 0x2212: "-", 0x2026: "..."}
_LETTERS = {"ß": "ss", "æ": "ae", "œ": "oe", "ø": "o", "ł": "l", "đ": "d", "ð": "d", "þ": "th"}
ALIKE |= {ord(c): said for one, said in _LETTERS.items() for c in {one, one.upper()[:1]} - {"S"}}
ALIKE |= {ord("ẞ"): "ss", ord("\u0131"): "i", ord("²"): " squared ", ord("³"): " cubed "}
_PARTS = {"½": "a half", "⅓": "a third", "¼": "a quarter", "⅔": "two thirds", "¾": "three quarters"}
_FRACTION = re.compile(r"(\d?)([\u00bc-\u00be\u2150-\u215e\u2189])")
_STARS = re.compile(r"(?<!\S)\*+(?=\w)|(?<=[^\W\d]|[.,:;!?)])\*+(?!\S)")  # that emphasise: *so*
# Kinds of signs that a listener misses: letters, numbers, symbols; not quotes, marks and accents.
_MISSED = ("L", "N", "Sc", "Sm", "So")


MARKS = (",", ".", "?")
LONGEST = 15  # digits of a number that is said as one; longer ones digit by digit
_NUMBER = r"\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+\.\d+|\d+"
_UNIT = "|".join(sorted(map(re.escape, UNITS), key=len, reverse=True))
_COIN = "".join(COINS)
_TOKEN = re.compile(
    rf"(?P<clock>\b(?:[01]?\d|2[0-3]):[0-5]\d\b)"
    r"|(?P<ordinal>\b\d+(?:st|nd|rd|th)\b)"
    rf"|(?P<money>[{_COIN}]\s?(?:{_NUMBER}))"
    rf"|(?P<number>(?:(?<![\w.)])-)?(?:{_NUMBER}))"
    rf"(?:\s?(?P<unit>{_UNIT})(?![a-z0-9]))?"
    rf"|(?P<short>(?<![a-z])(?:{'|'.join(map(re.escape, SHORT))})(?![a-z]))"
    r"|(?P<word>[a-z]+(?:'[a-z]+)*)"
    rf"|(?P<mark>\.{{2,}}|[,.{re.escape(''.join(PAUSES))}?])"
    r"|(?P<sign>\S)",
    re.IGNORECASE,
)
_BETWEEN = re.compile(rf"(?<=\d)\s?([{re.escape(''.join(BETWEEN))}])\s?(?=\d)", re.IGNORECASE)


def spoken(text: str) -> list[str]:
    """Return the spoken words of a text, such as `["it", "is", "three", "fifteen", "."]`."""
    return list(_tidy(_groups(_plain(text))))


def unspoken(text: str) -> list[str]:
    """Return what `spoken` leaves out of a text and a listener would miss, such as `["日本"]`."""
    plain, found, end = _plain(text), list[str](), -1
    for each in _TOKEN.finditer(plain):
        sign = each["sign"]
        if not sign or sign in SIGNS or not unicodedata.category(sign).startswith(_MISSED):
            continue
        if each.start() == end:
            found[-1] += sign
        else:
            found.append(sign)
        end = each.end()
    return [*dict.fromkeys(unicodedata.normalize("NFC", each) for each in found)]


class SpokenStream:
    """Streaming `spoken`: any split of a text gives the same words."""

    def __init__(self) -> None:
        self._held = ""
        self._last = ","  # a mark at the very start is dropped, as after another mark
        self._unspoken: list[str] = []

    def push(self, piece: str) -> list[str]:
        """Add a piece of text; return the words and marks that no later piece can change."""
        self._held += piece
        cut = _certain(self._held)
        ready, self._held = self._held[:cut], self._held[cut:]
        return self._out(ready)

    def finish(self) -> list[str]:
        """Return the rest when the text ends."""
        ready, self._held = self._held, ""
        return self._out(ready)

    def left_out(self) -> list[str]:
        """Return what was left out of the text that is spoken so far, and not returned before."""
        found, self._unspoken = self._unspoken, []
        return found

    def _out(self, text: str) -> list[str]:
        self._unspoken += unspoken(text)
        found = list(_tidy(_groups(_plain(text)), self._last))
        self._last = found[-1] if found else self._last
        return found


def _certain(text: str) -> int:
    """Length of the beginning whose words do not depend on later text.

    It ends at a space between a word of letters and another complete one.
    """
    spaces = [found.end() for found in re.finditer(r"(?<=[^\W\d_][,.?!]|[^\W\d_]{2})\s+", text)]
    for cut in reversed(spaces):
        after = re.match(r"[^\W\d_]+[,.?!]?\s", text[cut:])
        last = text[:cut].split()[-1]
        if after and last.rstrip(",.?!").isalpha() and last.lower() not in SHORT:
            return cut
    return 0


def _plain(text: str) -> str:
    text = _FRACTION.sub(_fraction, _STARS.sub("", text.translate(ALIKE)))
    text = unicodedata.normalize("NFKD", text)
    text = "".join(sign for sign in text if not unicodedata.combining(sign))
    text = re.sub(r"\s+", " ", text)
    text = re.sub(r"\s-+\s(?!\d)|(?<!\d)\s-+\s|--+", f" {DASH} ", text)
    return _BETWEEN.sub(_between, text)


def _fraction(found: re.Match[str]) -> str:
    """Write a fraction in words, which would run into the digit before it: 1½ is not 11/2."""
    over = unicodedata.normalize("NFKC", found[2]).replace("\u2044", " over ")
    return f"{found[1]}{' and' * bool(found[1])} {_PARTS.get(found[2], over)} "


def _between(found: re.Match[str]) -> str:
    apart = found[0][0] == " " and found[0][-1] == " "
    return f" {BETWEEN[found[1].lower()][apart]} "


def _groups(text: str) -> Iterator[str]:
    for found in _TOKEN.finditer(text):
        kind, token = str(found.lastgroup), found[0]
        if found["number"] is not None:
            yield from _quantity(found["number"], found["unit"])
        elif kind == "clock":
            yield from _clock(*map(int, token.split(":")))
        elif kind == "ordinal":
            yield from _said(token[:-2], "ordinal")
        elif kind == "money":
            yield from _money(token)
        elif kind == "short":
            yield from _short(token, text[found.end() :])
        elif kind == "word":
            yield from _word(token)
        elif kind == "mark":
            yield "," if token[:2] == ".." else PAUSES.get(token, token)
        else:
            yield from SIGNS.get(token, "").split()


def _short(token: str, after: str) -> Iterator[str]:
    """Expand an abbreviation; "no." is one before a number only."""
    if token.lower() == "no." and not re.match(r"\s*\d", after):
        yield from ("no", ".")
        return
    yield from SHORT[token.lower()].split()
    if not after.strip():
        yield "."


def _word(token: str) -> Iterator[str]:
    word = token.lower()
    if (
        2 <= len(token) <= 5
        and token.isalpha()
        and token.isupper()
        and not set(word) & set("aeiouy")
    ):
        yield from word
        return
    if word in CONTRACTIONS:
        yield from CONTRACTIONS[word].split()
        return
    for ending, full in ENDINGS.items():
        if word.endswith(ending) and len(word) > len(ending):
            yield from (word[: -len(ending)], full)
            return
    if word.endswith("'s") and word[:-2] in IS:
        yield from (word[:-2], "is")
        return
    yield SPELLINGS.get(word, word)


def _clock(hour: int, minute: int) -> Iterator[str]:
    if minute == 0:
        yield from (*_said(str(hour)), "o'clock")
    elif minute < 10:
        yield from (*_said(str(minute)), "past", *_said(str(hour)))
    else:
        yield from (*_said(str(hour)), *_said(str(minute)))


def _quantity(number: str, unit: str | None) -> Iterator[str]:
    if number[0] == "-":
        yield "minus"
        number = number[1:]
    yield from _said(number)
    if unit:
        one, many = UNITS[unit.lower()]
        yield from (one if number == "1" else many).split()


def _money(token: str) -> Iterator[str]:
    coin, number = token[0], token[1:].strip().replace(",", "")
    whole, _, cents = number.partition(".")
    yield from _said(whole)
    yield COINS[coin][whole != "1"]
    if len(cents) == 2 and int(cents):
        yield from ("and", *_said(str(int(cents))), "cent" if int(cents) == 1 else "cents")
    elif cents and len(cents) != 2:
        yield from ("point", *(word for digit in cents for word in _said(digit)))


def _said(number: str, form: str = "cardinal") -> list[str]:
    whole, _, part = number.replace(",", "").partition(".")
    after = [word for digit in part for word in _said(digit)]
    if len(whole) > LONGEST or (len(whole) > 1 and whole[0] == "0"):
        words = [word for digit in whole for word in _said(digit)]
    else:
        try:
            module: Any = importlib.import_module("num2words")
        except ImportError:
            raise MmfastError(
                'num2words is missing; it comes with: pip install "mmfast[speech]"'
            ) from None
        words = re.findall(r"[a-z]+", module.num2words(int(whole), to=form))
    return [*words, "point", *after] if after else words


def _tidy(parts: Iterable[str], before: str = ",") -> Iterator[str]:
    for part in parts:
        if part not in MARKS or before not in MARKS:
            yield part
        before = part if part not in MARKS or before not in MARKS else before
