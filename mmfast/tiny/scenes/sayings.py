"""Questions put as clauses behind what people say first: "Could you find out if it is red?"."""

from __future__ import annotations

import numpy as np

from mmfast.tiny.scenes.nouns import invented
from mmfast.tiny.video.questions import parse_grammar

# Of each form of question, with its slots.
CLAUSES = parse_grammar("""
colour = what colour the {0} is | which colour the {0} has | the colour of the {0}
shape = what shape the {0} object is | which shape the {0} thing has | the shape of the {0} object
count = how many objects there are | how many shapes can be seen | the number of objects
direction = which way the {0} moves | where the {0} is going | in which direction the {0} moves
speed = which is faster, the {0} or the {1} | which moves faster, the {0} or the {1}
position = where the {0} is{1} | in which corner the {0} is{1} | the position of the {0}{1}
first = which appears first, the {0} or the {1} | which comes first, the {0} or the {1}
number = what number is shown | which number is on the screen | the number on the screen
background = what kind of background there is | what the background looks like
exists = if there is a {0} | whether there is a {0} | that there is a {0} | whether a {0} is shown
relation = on which side of the {1} the {0} is{2} | where the {0} is relative to the {1}{2}
compare = if the {0} is {3} the {1}{2} | whether the {0} is {3} the {1}{2}
    | that the {0} is {3} the {1}{2}
where = the box of the {0}{1} | the bounding box of the {0}{1} | the coordinates of the {0}{1}
when = when the {0} appears | at which second the {0} appears
moves = if the {0} moves {1} | whether the {0} moves {1} | that the {0} is moving {1}
attribute = if {0} is {1} | whether {0} is {1} | that {0} is {1}
anything = if there is anything {0} | whether anything is {0} | that there is something {0}
amount = if there {0} {1} | whether there {0} {1} | that there {0} {1}
part = how many {0} there are | the number of {0} | how many {0} can be seen
which = which object {0} | what it is that {0} | which thing {0} | the thing that {0}
it_colour = what colour it is | which colour it has | its colour
it_shape = what shape it is | which shape it has | its shape
it_way = which way it moves | where it is going | in which direction it moves
it_place = where it is{1} | in which corner it is{1}
""")
# With a verb and a clause.
LEADS = (
    "Can you {0} {1}?", "Could you {0} {1}?", "Can you please {0} {1}?", "Please {0} {1}.",
    "{0} {1}.", "Would you {0} {1}?", "Do you {0} {1}?", "Can we {0} {1}?", "I want to {0} {1}.",
    "Help me {0} {1}.", "Try to {0} {1}.", "I would like you to {0} {1}.", "Let us {0} {1}.",
    "Are you able to {0} {1}?", "My job is to {0} {1}.", "Would you mind if I {0} {1}?",
    "I {0} {1}, right?", "May I {0} {1}?", "Hi, I need to {0} {1}.", "Is it possible to {0} {1}?",
    "How can I {0} {1}?", "Look again and {0} {1}.", "I wonder {1}.", "I have to {0} {1}, please.",
)  # fmt: skip
VERBS = (
    "tell me", "say", "show me", "see", "check", "know", "explain", "guess", "state", "decide",
    "judge", "find", "figure out", "work out", "make out", "point out", "estimate", "report",
    "prove", "note", "notice", "observe", "recall", "remember", "believe", "think", "assume",
    "suppose", "claim", "agree", "assure me", "remind me", "answer", "give me", "write down",
    "spell out", "name", "read out", "look up", "double-check", "make sure", "ensure", "verify",
    "establish", "discover", "learn", "understand", "recognise", "detect", "indicate", "mention",
    "reveal", "share", "specify", "clarify", "assess", "evaluate", "inspect", "test", "predict",
    "deduce", "infer", "conclude", "argue", "admit", "doubt", "imagine", "tell us", "inform me",
    "advise me", "ask",
)  # fmt: skip
# Verbs that no language has, so that no list of verbs has to be known.
INVENTED = tuple(invented(np.random.default_rng([0, number])) for number in range(60))
KEPT_LEADS = ("Could I ask you to {0} {1}?", "Would it be possible to {0} {1}?",
              "I am curious to {0} {1}.")  # fmt: skip
KEPT_VERBS = ("confirm", "determine", "find out", "let me know")
_PARTS = (LEADS, (*VERBS, *INVENTED)), (KEPT_LEADS, KEPT_VERBS)  # trained, and kept back


def sayings(form: str, kept: bool) -> range:
    """Numbers of the sentences that training shows, or of those kept back."""
    trained, others = (len(leads) * len(verbs) * len(CLAUSES[form]) for leads, verbs in _PARTS)
    return range(trained, trained + others) if kept else range(trained)


def saying(form: str, number: int) -> str:
    """A sentence of `sayings`; its slots are those of the form."""
    first = sayings(form, True).start
    (leads, verbs), number = _PARTS[number >= first], number - first * (number >= first)
    number, clause = divmod(number, len(CLAUSES[form]))
    lead, verb = divmod(number, len(verbs))
    text = leads[lead].format(verbs[verb], CLAUSES[form][clause])
    return text[0].upper() + text[1:]
