"""More ways to ask and to speak around a question, which came when the vocabulary stood."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from mmfast.tiny.scenes.sayings import INVENTED
from mmfast.tiny.video.questions import parse_grammar
from mmfast.tiny.video.scene import COLOURS, SHAPES

# Slots are those of the forms.
MORE = parse_grammar("""
colour =
    What is the colour that the {0} has? | What tint was used for the {0}?
    | How is the {0} coloured? | And what colour would the {0} be?
    | Which of the colours does the {0} show? | The colour of the {0} is what?
    | In which colour do we see the {0}? | Is the {0} red, green, blue, yellow, purple or white?
    | Colour the {0} has? | The {0} there, what is its colour? | What hue is the {0}?
    | Look at the {0}. What colour is it? | I am looking at the {0}. Its colour?
    | The {0} was drawn in which colour?
shape =
    What has the {0} colour? | Which object has the {0} colour? | What shape is of {0} colour?
    | The thing with the {0} colour is what shape? | Which thing has the colour {0}?
    | What shape would the {0} object be? | The {0} one is what kind of shape?
    | Is the {0} thing a circle, square, triangle, star or cross? | What do you call the {0} shape?
    | The {0} object: which shape? | And the shape of the {0} one?
    | What is the {0} thing shaped like? | Of which shape is the {0} object?
    | What does the {0} object look like? | Look at the {0} object. What shape is it?
    | How would you call the {0} one?
count =
    So how many are there? | How many objects do we have? | How many do you count?
    | How many shapes do we see here? | The number of shapes, please. | What is the count?
    | Please count what you see. | How many objects in total? | The objects, how many are they?
    | How many things are shown to us? | Count them all. | Give me the count of the shapes.
    | How many objects did they draw? | And how many objects are visible? | Sum up the objects.
    | How many shapes have been drawn? | There are how many objects? | Objects in the clip?
    | Could you count for me how many objects there are? | How many objects are being shown?
    | Go and count all shapes. | The total number of things is what?
direction =
    Where does the {0} go to? | To where is the {0} moving? | The {0} is heading which way?
    | Does the {0} move left, right, up or down? | What is the way of the {0}?
    | Which way has the {0} gone? | The {0} went which way? | Which way did the {0} move?
    | Where did the {0} go? | In which direction has the {0} moved? | Whither goes the {0}?
    | Follow the {0}. Where does it go? | The motion of the {0} is in which direction?
    | The {0} goes left, right, up or down? | Where is the {0} off to? | Where is the {0} headed?
speed =
    Who wins a race, the {0} or the {1}? | Which of the two is quicker: the {0} or the {1}?
    | The {0} and the {1}: who is faster? | What travels faster, the {0} or the {1}?
    | Who has more speed, the {0} or the {1}? | Was the {0} or the {1} faster?
    | Which went faster, the {0} or the {1}? | The quicker of the {0} and the {1} is which?
    | Name the faster one: the {0} or the {1}? | Which one would win, the {0} or the {1}?
position =
    Where do I find the {0}{1}? | Where can I see the {0}{1}? | Where would you see the {0}{1}?
    | Which part of the picture is the {0} in{1}? | The {0} lies where{1}? | Find the {0}{1}: where?
    | In what corner does the {0} sit{1}? | Where was the {0}{1}? | Where did you see the {0}{1}?
    | Point me to the corner of the {0}{1}. | Top or bottom, left or right: where is the {0}{1}?
    | Where have they put the {0}{1}? | The place of the {0}{1}? | Where does the {0} stand{1}?
first =
    Which was seen first, the {0} or the {1}? | Who came first, the {0} or the {1}?
    | Which of them was earlier, the {0} or the {1}? | The {0} or the {1}, which one came first?
    | Did the {0} or the {1} appear first? | Who arrived first: the {0} or the {1}?
    | Name the first of the {0} and the {1}. | What did we see first, the {0} or the {1}?
number =
    What number did you see? | Which number has been shown? | Can you see a number? Which one?
    | Say the number. | The number is what? | Spell the digits. | What number was there?
    | And the number? | Which two digits are shown? | What number does it show? | Number?
background =
    And the background? | What is there behind the things? | What kind of background was used?
    | Is it a plain, a photo, a gradient or a blur background? | The background is of which kind?
    | How does the background look? | Say what kind of background you see. | Background?
exists =
    Can there be a {0}? | Is there a {0} somewhere? | Is a {0} to be seen? | Was there a {0}?
    | Any {0}? | Do we see a {0}? | Did you see a {0}? | Is a {0} part of it?
    | Could you spot a {0}? | Does one see a {0}? | Have they drawn a {0}? | Is there perhaps a {0}?
    | Do I see a {0}? | I think there is a {0}, right? | Did they show a {0}? | Does a {0} turn up?
    | Look for a {0}. | Is there also a {0}? | Are you seeing a {0}? | There is a {0}, correct?
    | A {0}, yes or no?
relation =
    Where do I find the {0} from the {1}{2}?
    | Is the {0} to the left or right, above or below the {1}{2}?
    | The {0} is where, seen from the {1}{2}? | The {0} lies on what side of the {1}{2}?
    | Which side of the {1} has the {0}{2}? | If I look from the {1}, where is the {0}{2}?
compare =
    Was the {0} {3} the {1}{2}? | The {0} lies {3} the {1}{2}, correct?
    | Is it so that the {0} is {3} the {1}{2}? | Could the {0} be {3} the {1}{2}?
    | I say the {0} is {3} the {1}{2}, right? | The {0} is {3} the {1}{2}, is it not?
    | Right or wrong: the {0} is {3} the {1}{2}?
when =
    When did the {0} come in? | The {0} is there since which second? | When was the {0} first seen?
    | Which second brings the {0}? | When does the {0} first come up?
    | From when on is the {0} there? | The {0} comes at what second?
    | After how many seconds does the {0} appear?
moves =
    Has the {0} moved {1}? | Did the {0} move {1}? | Was the {0} going {1}?
    | The {0} goes {1}, right? | The {0} is moving {1}, is it not? | Could the {0} be moving {1}?
    | Did the {0} go {1}? | I think the {0} goes {1}. Right? | Right or wrong: the {0} moves {1}?
    | Does the {0} drift {1}? | Do we see the {0} move {1}? | Is it so that the {0} moves {1}?
attribute =
    Was {0} {1}? | Could {0} be {1}? | {0} is {1}, is it not? | {0} is {1}, correct?
    | Right or wrong: {0} is {1}? | Is it so that {0} is {1}? | I think {0} is {1}. Right?
    | I guess {0} is {1}? | Can {0} be {1}? | Must {0} be {1}? | Has {0} been {1}?
    | Do we see that {0} is {1}? | Surely {0} is {1}? | My friend says {0} is {1}. Is he right?
anything =
    Was anything {0}? | Have you seen anything {0}? | Anything {0}? | Could anything be {0}?
    | Did they draw anything {0}? | Something {0} is there, right? | Do we have anything {0}?
amount =
    So {0} there {1}, yes or no? | There {0} {1}, correct? | Right or wrong: there {0} {1}?
    | Is it so that there {0} {1}? | I think there {0} {1}. Right? | There {0} {1}, is it not so?
part =
    So how many {0} are there? | How many {0} do we have? | How many {0} do you count?
    | The number of {0}, please. | {0}, how many are they? | Give me the count of {0}.
    | How many {0} have been drawn? | There are how many {0}? | How many {0} are visible?
    | How many {0} can we find? | Count me the {0}. | How many of them are {0}?
which =
    What object {0}? | Who {0}? | Tell me the one that {0}. | I look for the object that {0}.
    | Which of the things {0}? | Which of the shapes {0}? | And what {0}? | So which one {0}?
    | Look for the object that {0}. Which is it? | Name the one that {0}.
    | Which one is it that {0}? | There is one that {0}: which?
    | What is the name of the thing that {0}? | The one that {0}? | Say which object {0}.
    | The object which {0} is which one? | What do we see that {0}?
""")
# None of these is ever trained: they were written down by ear, not from the rows above.
FREE = parse_grammar("""
colour =
    hey what color's the {0} | Could somebody tell me the colour that the {0} was painted in?
    | For the {0}, name its colour | I cannot see well, which colour is that {0}?
    | the {0} - what colour would that be?
shape =
    Would you kindly say what shape the {0} thing happens to be? | what's the {0} thing's shape?
    | The {0} one: is it a circle, a square, a triangle, a star or a cross?
count =
    Do me a favour and count all the objects. | What's the total of the objects on display?
    | So how many shapes are we looking at? | objects: how many?
direction =
    Say, where does the {0} head? | Does the {0} go left, right, up or down?
    | The {0} travels in what direction, please? | I lost track, which way did the {0} go?
speed =
    Out of the {0} and the {1}, who's quicker? | Is the faster one the {0} or the {1}?
    | If the {0} races the {1}, which one is faster?
position =
    Tell us in which corner we can find the {0}{1} | Where should I look for the {0}{1}?
    | Where abouts in the picture would the {0} be{1}?
first = Who was there first: the {0} or the {1}? | Did we see the {0} or the {1} first?
number =
    Which number do you read on the screen? | What digits appear? | whats the number shown here?
background = And the background, what kind is it? | What sort of background do we have here?
exists =
    Does it contain a {0}? | Is there by any chance a {0}? | Was a {0} shown at some point?
    | Anywhere a {0}?
relation =
    Seen from the {1}, on which side is the {0}{2}? | If I stand at the {1}, where's the {0}{2}?
compare =
    Would it be correct that the {0} is {3} the {1}{2}?
    | I think the {0} is {3} the {1}{2}. Is that so?
when = From what second can the {0} be seen? | The {0} appears at which second?
moves =
    Is it right that the {0} is moving {1}? | I believe the {0} moves {1}, correct?
    | Was the {0} moving {1}?
attribute =
    Could you confirm whether {0} is {1}? | I would say {0} is {1}. Correct?
    | Please determine if {0} is {1}. | Is it right that {0} is {1}? | Just to be sure: is {0} {1}?
part = What's the count of {0}? | How many {0} have you found? | How many {0} did they draw?
which =
    Which item {0}? | What's the thing that {0}? | Give the name of the object that {0}.
    | Tell me about the one object that {0}: which is it?
""")
_NAMELESS = ("item", "element", "entity", "piece", "body")
LOOSER = {  # other words for the same
    "object": _NAMELESS,
    "thing": _NAMELESS,
    "what is": ("what's", "whats"),
    "where is": ("where's", "wheres"),
}
OPENINGS = (
    "I cannot tell: ", "One more thing: ", "My son asks: ", "For a quiz: ", "Be honest: ",
    "Let me ask: ", "Well, ", "Now, ", "Right, ", "Sorry, ", "Excuse me, ", "Thanks! ",
    "Good day, ", "Just curious: ", "I forgot: ", "In short: ", "To begin with, ", "Look here: ",
    "Hmm, ", "Wait, ", "As far as you can see, ", "From what you see, ", "According to the clip, ",
    "Based on the video, ", "In the picture above, ", "Given this clip, ", "Take your time. ",
    "Think step by step. ", "You are a helpful assistant. ", "Answer the question: ", "Q: ",
    "Help! ", "I did not watch it. ", "Here is a clip. ", "See the picture. ", "And ", "But ",
    "Then ", "Watch the film and answer: ", "I am blind, ", "First question: ", "Next: ",
    "My guess is wrong. ",
)  # fmt: skip
CLOSINGS = (
    " Thanks.", " thank you", " Be brief.", " I need to know.", " Reply with one word.",
    " Do not explain.", " if you please", " for me", ", my friend?", " I am not sure.", " A:",
    " That is all.", " Only the answer.", ", would you say?", " in your view?", " Cheers!",
)  # fmt: skip
FILLERS = (
    "really", "actually", "now", "here", "then", "exactly", "just", "maybe", "perhaps", "kindly",
    "still", "again", "today", "currently", "eventually", "truly", "indeed", "by chance", "for me",
    "if you can", "if possible", "at all", "do you think", "once more", "in fact", "of course",
    *INVENTED[:30],
)  # fmt: skip
_LOOSER = re.compile(rf"(?<!hich )\b({'|'.join(LOOSER)})\b", re.I)  # "Which item" is kept back
_NAMES = {*COLOURS, *SHAPES, "a", "the", "top", "bottom", "to", "more"}  # nothing comes behind them


def spoken(text: str, rng: np.random.Generator) -> str:
    """The text as people say it: looser words, more of them, and slips of the hand."""
    if rng.random() < 0.15:
        text = _LOOSER.sub(lambda found: one(LOOSER[found[0].lower()], rng), text)
    if rng.random() < 0.12:
        text = _filled(text, rng)
    if rng.random() < 0.04:
        text = _mistyped(text, rng)
    if rng.random() < 0.12:
        text = one(OPENINGS, rng) + text
    if rng.random() < 0.08:
        text += one(CLOSINGS, rng)
    return text


def one(words: Sequence[str], rng: np.random.Generator) -> str:
    """One of the words."""
    return words[int(rng.integers(len(words)))]


def _filled(text: str, rng: np.random.Generator) -> str:
    """A word that says nothing before one of the others, but not within a name."""
    words = text.split(" ")
    gaps = [i for i in range(1, len(words)) if words[i - 1].strip("?,.:").lower() not in _NAMES]
    if not gaps:
        return text
    gap = gaps[int(rng.integers(len(gaps)))]
    return " ".join([*words[:gap], one(FILLERS, rng), *words[gap:]])


def _mistyped(text: str, rng: np.random.Generator) -> str:
    """A long word without one of its letters, or with two of them in turned order."""
    words = text.split(" ")
    long = [place for place, word in enumerate(words) if len(word) > 4]
    if not long:
        return text
    place = long[int(rng.integers(len(long)))]
    word, at = words[place], int(rng.integers(1, len(words[place]) - 2))
    turned = word[at + 1] + word[at] if rng.random() < 0.5 else word[at]
    words[place] = word[:at] + turned + word[at + 2 :]
    return " ".join(words)
