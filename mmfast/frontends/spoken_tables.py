"""How written things are said in English."""

from __future__ import annotations

SPELLINGS = {
    "color": "colour",
    "colors": "colours",
    "favorite": "favourite",
    "gray": "grey",
    "center": "centre",
    "meter": "metre",
    "meters": "metres",
    "ok": "okay",
    "hi": "hello",
}
SHORT = {
    "mr.": "mister",
    "mrs.": "missus",
    "ms.": "miss",
    "dr.": "doctor",
    "vs.": "versus",
    "etc.": "and so on",
    "e.g.": "for example",
    "i.e.": "that is",
    "approx.": "about",
    "no.": "number",
    "a.m.": "a m",
    "p.m.": "p m",
}
CONTRACTIONS = {
    "can't": "can not",
    "cannot": "can not",
    "won't": "will not",
    "shan't": "shall not",
    "let's": "let us",
    "i'm": "i am",
}
# Endings of contractions; 's is "is" behind these words alone, elsewhere it may be a possessive.
ENDINGS = {"n't": "not", "'re": "are", "'ll": "will", "'ve": "have", "'d": "would"}
IS = {"it", "that", "what", "there", "here", "he", "she", "who", "where", "how", "when", "this"}
UNITS = {
    "%": ("percent", "percent"),
    "‰": ("per mille", "per mille"),
    "°c": ("degree celsius", "degrees celsius"),
    "°f": ("degree fahrenheit", "degrees fahrenheit"),
    "°": ("degree", "degrees"),
    "km/h": ("kilometre per hour", "kilometres per hour"),
    "m/s": ("metre per second", "metres per second"),
    "km": ("kilometre", "kilometres"),
    "cm": ("centimetre", "centimetres"),
    "mm": ("millimetre", "millimetres"),
    "m": ("metre", "metres"),
    "kg": ("kilogram", "kilograms"),
    "g": ("gram", "grams"),
    "ms": ("millisecond", "milliseconds"),
    "s": ("second", "seconds"),
    "sec": ("second", "seconds"),
    "min": ("minute", "minutes"),
    "h": ("hour", "hours"),
    "hz": ("hertz", "hertz"),
    "khz": ("kilohertz", "kilohertz"),
    "mb": ("megabyte", "megabytes"),
    "gb": ("gigabyte", "gigabytes"),
    "px": ("pixel", "pixels"),
    "fps": ("frame per second", "frames per second"),
    "x": ("times", "times"),
    "am": ("a m", "a m"),
    "pm": ("p m", "p m"),
}
COINS = {"$": ("dollar", "dollars"), "€": ("euro", "euros"), "£": ("pound", "pounds")}
SIGNS = {
    "+": "plus",
    "=": "is",
    "\u00d7": "times",
    "*": "times",
    "÷": "divided by",
    "/": "slash",
    "&": "and",
    "@": "at",
    "#": "number",
    "%": "percent",
    "<": "less than",
    ">": "greater than",
    "°": "degrees",
    **{sign: plural for sign, (_, plural) in COINS.items()},
}
# Between two numbers, without their spaces and with them.
BETWEEN = {
    "-": ("to", "minus"),
    "\u2013": ("to", "to"),
    "/": ("slash", "divided by"),
    "x": ("times", "times"),
}
DASH = "\u2014"
PAUSES = {"!": ".", "\u2013": ","} | dict.fromkeys(f";:()[]{DASH}", ",")
ALIKE = {0x2018: "'", 0x2019: "'", 0x2212: "-", 0x2026: "..."}
