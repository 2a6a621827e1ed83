"""Questions of the larger world: their wordings, of which the last two of a kind are kept back.

Slots: names of things, or a phrase of time such as " at the end", empty for a picture.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mmfast.tiny.scenes.sayings import saying, sayings
from mmfast.tiny.scenes.wordings import MORE, one, spoken
from mmfast.tiny.video.questions import Fact, parse_grammar

KEPT = 2  # wordings of each kind that training never shows
PREFIXES = (
    "please tell me: ",
    "look closely. ",
    "watch this. ",
    "quick question: ",
    "so, ",
    "hey, ",
    "hello! ",
    "ok, ",
    "question: ",
    "can you tell me: ",
    "i would like to know: ",
    "please answer: ",
    "in this video: ",
    "look at the picture. ",
)
SUFFIXES = (", please", " in one word", " answer briefly.", " answer with a single word or phrase.")
ALIKE = {  # what people say for the same
    "video": ("clip", "film", "recording", "scene"),
    "picture": ("image", "photo", "frame", "scene"),
    "objects": ("things", "shapes", "items", "figures"),
    "shapes": ("objects", "figures", "forms"),
    "moves": ("goes", "travels"),
    "appear": ("show up", "come up", "turn up"),
    "appears": ("shows up", "comes up"),
    "faster": ("quicker",),
    "at the start": ("at the beginning", "in the first frame"),
    "at the end": ("in the last frame", "in the end"),
    "left of": ("to the left of", "on the left of"),
    "right of": ("to the right of", "on the right of"),
    "above": ("over", "higher than"),
    "below": ("under", "lower than"),
}
_SAYABLE = re.compile(rf"\b({'|'.join(ALIKE)})\b")
AMERICAN = {"colour": "color", "centre": "center"}

WORDINGS = parse_grammar("""
colour =
    What colour is the {0}? | Which colour does the {0} have? | What is the colour of the {0}?
    | The {0} has which colour? | Name the colour of the {0}. | Tell me the colour of the {0}.
    | In what colour is the {0} drawn? | What colour does the {0} have? | {0}: what colour?
    | Which colour is the {0}? | What is the {0}'s colour?
    | Can you tell me the colour of the {0}? | Identify the colour of the {0}.
    | The {0} is what colour? | What colour has the {0}? | Colour of the {0}?
    | What colour would you say the {0} is? | Give the colour of the {0}.
    | Which colour is used for the {0}? | I see a {0}, what colour is it?
    | Of what colour is the {0}? | Say which colour the {0} has.
shape =
    What shape is the {0} object? | Which shape does the {0} object have?
    | What is the shape of the {0} object? | What kind of shape is the {0} one?
    | Name the shape of the {0} thing. | The {0} object is what shape? | What is the {0} object?
    | Which shape is {0}? | Tell me the shape of the {0} object. | What shape is drawn in {0}?
    | What shape does the {0} thing have? | Identify the {0} shape.
    | Give the shape of the {0} object. | What is {0}? | Which object is {0}?
    | What figure is {0}? | Shape of the {0} object? | What form does the {0} object have?
    | Which kind of shape is the {0} one? | Can you name the {0} shape? | What thing is {0}?
    | Which shape has the {0} colour? | Say what shape the {0} one is.
count =
    How many objects are there? | How many objects appear in the video?
    | How many shapes can you see? | Count the objects. | What is the number of objects?
    | How many things are in the picture? | Tell me how many shapes there are.
    | How many different objects do you see? | Number of shapes? | How many objects are shown?
    | How many are there? | How many objects does the video contain?
    | What is the total number of shapes? | How many shapes move around?
    | Can you count the objects? | Count the things in the video. | How many figures are there?
    | Give the number of objects. | How many items do you count?
    | How many objects are in the video altogether? | In total, how many objects are there?
    | Count all objects. | Count everything. | How many shapes can be seen?
    | Count the shapes you see. | How many in all? | How many objects can you see in total?
    | How many shapes does the picture have? | How many shapes are there in all?
    | Count all the shapes you can see.
direction =
    Which way does the {0} move? | In which direction does the {0} move? | Where is the {0} going?
    | What is the direction of the {0}? | Which way is the {0} going?
    | Where does the {0} move to? | The {0} moves in which direction?
    | Tell me the direction in which the {0} moves. | How does the {0} move?
    | Where is the {0} heading? | What direction is the {0} moving in?
    | Which direction does the {0} take? | To which side does the {0} move?
    | In which direction is the {0} moving? | Is the {0} moving left, right, up or down?
    | Direction of the {0}? | What way does the {0} go? | The {0} goes which way?
    | Give the direction of the {0}. | Where is the {0} moving? | Which way is the {0} moving?
    | Towards which side does the {0} travel? | Which way is the {0} heading?
    | In what direction is the {0} going?
speed =
    Which moves faster, the {0} or the {1}? | Which is faster, the {0} or the {1}?
    | What moves faster: the {0} or the {1}? | Is the {0} or the {1} faster?
    | Who is quicker, the {0} or the {1}? | Which of the two is faster, the {0} or the {1}?
    | The {0} or the {1}: which has more speed? | Compare the {0} and the {1}: which is faster?
    | Tell me which is quicker, the {0} or the {1}. | Does the {0} or the {1} move faster?
    | Which one is faster, the {0} or the {1}? | Which object moves faster: the {0} or the {1}?
    | Between the {0} and the {1}, which is faster? | Who moves faster, the {0} or the {1}?
    | Who is faster: the {0} or the {1}? | Is it the {0} or the {1} that moves faster?
    | Which has the higher speed, the {0} or the {1}? | What is faster, the {0} or the {1}?
    | Which of these is faster: the {0} or the {1}? | Of the {0} and the {1}, which is faster?
    | Which is the quicker one, the {0} or the {1}? | The {0} or the {1}: which moves faster?
position =
    Where is the {0}{1}? | In which corner is the {0}{1}? | Which corner is the {0} in{1}?
    | In which part of the picture is the {0}{1}? | Where do you see the {0}{1}?
    | Where can the {0} be found{1}? | Name the corner of the {0}{1}.
    | The {0} is in which corner{1}? | Tell me the corner where the {0} is{1}.
    | What is the position of the {0}{1}? | What corner is the {0} in{1}?
    | In what part of the picture does the {0} lie{1}? | Which corner holds the {0}{1}?
    | Where does the {0} lie{1}? | Whereabouts is the {0}{1}? | Position of the {0}{1}?
    | The {0}, where is it{1}? | Where in the video is the {0}{1}?
    | Can you say where the {0} is{1}? | At which place is the {0}{1}?
    | Which quarter of the picture is the {0} in{1}? | Which part of the picture shows the {0}{1}?
    | Where in the picture is the {0}{1}?
first =
    Which appears first, the {0} or the {1}? | Which came first, the {0} or the {1}?
    | What appears first: the {0} or the {1}? | Which is seen first, the {0} or the {1}?
    | Does the {0} or the {1} appear first? | Of the {0} and the {1}, which comes first?
    | The {0} or the {1}: which is earlier? | Which one shows up first, the {0} or the {1}?
    | Tell me which comes first, the {0} or the {1}. | Is the {0} or the {1} seen first?
    | Which object came first, the {0} or the {1}? | Who appears first, the {0} or the {1}?
    | Which is first, the {0} or the {1}? | Which arrives first: the {0} or the {1}?
    | Between the {0} and the {1}, which appears first?
    | Which was there first, the {0} or the {1}? | What came first, the {0} or the {1}?
    | Does the {0} come before the {1}, or which is first?
    | Which do you see first, the {0} or the {1}? | Was the {0} or the {1} first?
    | Which appears earlier, the {0} or the {1}? | Which comes up earlier, the {0} or the {1}?
    | Who is there earlier, the {0} or the {1}? | Which is the earlier one, the {0} or the {1}?
    | Which shows up earlier, the {0} or the {1}?
    | Did the {0} or the {1} come first? | Which of the {0} and the {1} appears first?
number =
    What number is on the screen? | Which number is shown? | What number appears in the video?
    | Read the number. | What does the number say? | Which number can you see?
    | Tell me the number on the screen. | What is the number? | Which digits are shown?
    | What number do you see? | What number is shown? | Which number is displayed?
    | What is the number on the screen? | What does the screen say? | What digits can you read?
    | Tell me the number. | Can you read the number? | What is written on the screen?
    | Which number is written there? | Which number is it? | Give the number.
    | What number is in the picture? | Which number appears on the screen?
    | Name the number shown.
background =
    What kind of background is it? | What is the background like? | Which background is there?
    | Describe the background in one word. | What background does the video have?
    | Is the background plain, a gradient, a photo or a blur? | Name the kind of background.
    | What is behind the objects? | Tell me the kind of background.
    | What sort of background is used? | What is the background? | Which kind of background is it?
    | What does the background look like? | What type of background is there?
    | Type of background? | Is the background a photo, a gradient, a blur or plain?
    | How would you call the background? | Identify the background.
    | Which type of background does the picture have? | Which kind of background do you see?
    | What is the background of the picture?
exists =
    Is there a {0}? | Is there a {0} in the picture? | Do you see a {0}? | Can you see a {0}?
    | Does the video show a {0}? | Is a {0} shown? | Does a {0} appear? | Is a {0} there?
    | Tell me if there is a {0}. | Is there any {0}? | Is there a {0} in the video?
    | Is there a {0} anywhere? | Does the video contain a {0}?
    | Is a {0} in the picture? | Do you find a {0}? | Can you find a {0} in the video?
    | Is a {0} visible? | Have you seen a {0}? | Did a {0} appear? | Is there a {0}, yes or no?
    | Yes or no: is there a {0}? | Are you able to see a {0}? | Is the {0} there?
    | Does the picture have a {0}? | Can a {0} be seen?
relation =
    On which side of the {1} is the {0}{2}? | Where is the {0} seen from the {1}{2}?
    | Relative to the {1}, where is the {0}{2}? | Compared to the {1}, where is the {0}{2}?
    | Is the {0} left, right, above or below of the {1}{2}?
    | Which side of the {1} is the {0} on{2}? | Where is the {0} relative to the {1}{2}?
    | From the {1}, where do you see the {0}{2}? | Where does the {0} lie compared to the {1}{2}?
    | What side of the {1} is the {0} on{2}? | Where is the {0} with respect to the {1}{2}?
    | In relation to the {1}, where is the {0}{2}? | How does the {0} lie relative to the {1}{2}?
    | Looking from the {1}, where is the {0}{2}?
    | Is the {0} above, below, left or right of the {1}{2}?
    | What is the position of the {0} relative to the {1}{2}?
    | On what side of the {1} is the {0}{2}? | The {0} is on which side of the {1}{2}?
    | Where is the {0} compared to the {1}{2}? | Tell me on which side of the {1} the {0} is{2}.
    | On which side of the {1} does the {0} lie{2}?
    | Does the {0} lie left, right, above or below of the {1}{2}?
    | Seen from the {1}, where is the {0}{2}? | On what side of the {1} does the {0} lie{2}?
compare =
    Is the {0} {3} the {1}{2}? | Does the {0} lie {3} the {1}{2}?
    | Do you see the {0} {3} the {1}{2}? | Is the {0} found {3} the {1}{2}?
    | Can you see the {0} {3} the {1}{2}? | Tell me if the {0} is {3} the {1}{2}.
    | Is it true that the {0} is {3} the {1}{2}? | The {0} is {3} the {1}{2}, yes or no?
    | Compare: is the {0} {3} the {1}{2}? | Is the {0} shown {3} the {1}{2}?
    | Is the {0} {3} the {1}{2} or not? | Does the {0} appear {3} the {1}{2}?
    | Would you say the {0} is {3} the {1}{2}? | Is the {0} located {3} the {1}{2}?
    | Check if the {0} is {3} the {1}{2}. | Is the {0} placed {3} the {1}{2}?
    | Am I right that the {0} is {3} the {1}{2}? | Does one see the {0} {3} the {1}{2}?
    | True or not: the {0} is {3} the {1}{2}? | Is the {0} somewhere {3} the {1}{2}?
    | Can the {0} be seen {3} the {1}{2}? | Yes or no: is the {0} {3} the {1}{2}?
where =
    Give the box of the {0}{1}. | What is the bounding box of the {0}{1}? | Locate the {0}{1}.
    | Draw a box around the {0}{1}. | Give the coordinates of the {0}{1}. | Box of the {0}{1}?
    | What are the coordinates of the {0}{1}? | Tell me the box of the {0}{1}.
    | Where exactly is the {0}{1}? Give a box. | Mark the {0} with a box{1}.
    | Give me the box of the {0}{1}. | Give the bounding box of the {0}{1}.
    | Bounding box of the {0}{1}? | Coordinates of the {0}{1}? | Show the box of the {0}{1}.
    | Put a box around the {0}{1}. | Provide the box of the {0}{1}.
    | Return the bounding box of the {0}{1}. | Detect the {0}{1}.
    | Output the box coordinates of the {0}{1}. | Please provide the bounding box of the {0}{1}.
    | What box contains the {0}{1}? | Point to the {0} with a box{1}.
    | Which box is around the {0}{1}? | Find the {0} and give its box{1}.
when =
    At which second does the {0} appear? | When does the {0} appear? | When is the {0} first seen?
    | In which second does the {0} appear? | At what second does the {0} show up?
    | Second of the first sight of the {0}? | Tell me when the {0} appears.
    | When does the {0} come? | At which second do you first see the {0}?
    | When do you first see the {0}? | At which second does the {0} come in?
    | When does the {0} come into view? | When did the {0} appear?
    | What is the second in which the {0} appears? | From which second on is the {0} seen?
    | When does the {0} show up? | Since which second is the {0} there?
    | At what time does the {0} appear? | At what second does the {0} appear?
    | When can you first see the {0}? | Give the second at which the {0} appears.
    | At what second is the {0} first shown? | In which second is the {0} first seen?
describe =
    Describe the video. | Describe the picture. | What happens in the video? | What do you see?
    | Tell me what you see. | Describe everything. | What is shown? | Say what happens.
    | Give a description. | Describe all objects. | Describe the clip. | Describe the scene.
    | What is going on? | What is happening? | What can you see? | Describe this video.
    | Describe this picture. | What is in the picture? | What does the video show?
    | Describe the video in detail. | Describe the picture in detail. | Give a full description.
    | Explain what you see. | Summarise the video. | What happens here? | Write a description.
    | Tell me about the video. | Tell me about the picture. | Caption this. | What is to be seen?
    | Can you describe the video? | Please describe what is shown.
    | Describe what is to be seen. | Describe what happens. | Tell me what is going on.
    | Tell me what goes on. | Describe all you see. | Say what you see.
    | Describe in detail what happens. | Describe what you see. | Tell me what happens.
again =
    And the {0}? | What about the {0}? | And what about the {0}? | The {0}? | How about the {0}?
    | The same for the {0}? | And for the {0}? | Now the {0}. | Next, the {0}. | Then the {0}?
    | What of the {0}? | Same question for the {0}. | And with the {0}? | And for the {0} too?
    | And the {0}, please? | The {0} too? | Also the {0}? | And now the {0}?
    | What about the {0} then?
its_colour =
    And its colour? | What colour is it? | Which colour does it have? | And what is its colour?
    | Its colour? | What is its colour? | Tell me its colour. | In which colour?
    | And which colour? | What colour does it have? | So which colour is it?
    | What is the colour of it? | And its colour, please? | Its colour, please. | Name its colour.
    | Which colour is it? | And what colour is it?
its_way =
    And which way does it move? | Where is it going? | In which direction does it move?
    | And its direction? | Which way is it going? | How does it move? | What is its direction?
    | And where does it move to? | Tell me its direction. | And where is it heading?
    | Which way does it go? | And where is it moving? | Where does it go?
    | And which way is it going? | Its direction? | Name its direction. | And where is it going?
    | Which way does it move?
""")
LONE = parse_grammar("""
it_colour =
    What colour is it? | Which colour is it? | What colour do you see? | Which colour do you see?
    | Name the colour. | Tell me the colour. | What is the colour? | What is its colour?
    | What colour is shown? | Which colour is shown? | What colour is there? | What colour is this?
    | Which colour does it have? | What is the colour of it? | In what colour is it drawn?
    | What colour has it? | What colour does it have? | Give the colour. | Its colour?
    | What colour can you see? | Which colour is this?
it_shape =
    What shape is it? | Which shape is it? | What is it? | What is this? | What shape do you see?
    | Which shape do you see? | What shape is shown? | Name the shape. | Tell me the shape.
    | What is the shape? | What kind of shape is it? | What shape is this? | Which shape is shown?
    | What object is it? | What is the object? | What is its shape? | What shape is the object?
    | Which shape does the object have? | What is the shape of the object? | Give the shape.
    | What object do you see? | Which object is shown? | What shape is in the picture?
    | What shape does it have? | What thing is it? | What figure is it? | What shape is there?
    | Which shape can you see? | What kind of shape is this?
moves =
    Does the {0} move {1}? | Is the {0} moving {1}? | Does the {0} go {1}? | Is the {0} going {1}?
    | Is the {0} heading {1}? | Do you see the {0} move {1}? | Can you see the {0} move {1}?
    | Does the {0} travel {1}? | Tell me if the {0} moves {1}. | Is it true that the {0} moves {1}?
    | The {0} moves {1}, yes or no? | Yes or no: does the {0} move {1}?
    | Is the {0} moving {1} or not? | Would you say the {0} moves {1}?
    | Check if the {0} moves {1}. | Am I right that the {0} moves {1}?
it_way =
    Which way does it move? | Where is it going? | In which direction does it move?
    | Which way is it going? | How does it move? | What is its direction? | Where does it move to?
    | Tell me its direction. | Where is it heading? | Which way does it go? | Where is it moving?
    | Which way is it moving? | In which direction is it moving? | Where does it go?
    | Is it moving left, right, up or down? | What direction is it moving in?
    | In which direction is it going? | Which way is it heading?
it_place =
    Where is it{1}? | In which corner is it{1}? | Which corner is it in{1}?
    | Where do you see it{1}? | In which part of the picture is it{1}? | Where can it be found{1}?
    | Name its corner{1}.
    | What is its position{1}? | What corner is it in{1}? | Where does it lie{1}?
    | Tell me the corner where it is{1}. | Whereabouts is it{1}? | Its position{1}?
    | Which part of the picture is it in{1}? | Where in the picture is it{1}?
it_box =
    Give its box{1}. | What is its bounding box{1}? | Locate it{1}. | Draw a box around it{1}.
    | Give its coordinates{1}. | What are its coordinates{1}? | Tell me its box{1}.
    | Where exactly is it{1}? Give a box. | Mark it with a box{1}. | Give its bounding box{1}.
    | Show its box{1}. | Put a box around it{1}. | Provide its box{1}. | Which box is around it{1}?
    | Give me its box{1}. | Find it and give its box{1}.
attribute =
    Is {0} {1}? | Is {0} {1} or not? | Is it true that {0} is {1}? | Yes or no: is {0} {1}?
    | Would you say {0} is {1}? | {0} is {1}, yes or no? | Tell me if {0} is {1}.
    | Am I right that {0} is {1}? | Check if {0} is {1}. | True or not: {0} is {1}?
    | Do you think {0} is {1}? | Can you tell if {0} is {1}? | Is {0} really {1}?
    | Can you say if {0} is {1}? | Please check if {0} is {1}. | Do you agree that {0} is {1}?
    | Verify that {0} is {1}. | Say if {0} is {1}. | Could you tell me if {0} is {1}?
    | Is it the case that {0} is {1}? | Can we say that {0} is {1}? | Is {0} indeed {1}?
    | Would it be right to say that {0} is {1}? | So {0} is {1}? | Tell me: is {0} {1}?
    | {0} is {1}, right? | Does one see that {0} is {1}? | Can you confirm that {0} is {1}?
anything =
    Is there anything {0}? | Is anything {0}? | Is there something {0}? | Do you see anything {0}?
    | Can you see something {0}? | Do you see something {0}? | Can you see anything {0}?
    | Does anything {0} appear? | Is anything {0} shown? | Is something {0}?
    | Yes or no: is anything {0}? | Tell me if anything is {0}. | Is anything {0} in the picture?
    | Is there anything {0} in the video? | Is there anything {0} to be seen?
    | Does the picture show anything {0}?
amount =
    {0} there {1}? | Is it true that there {0} {1}? | Yes or no: {0} there {1}?
    | Tell me if there {0} {1}. | {0} there {1} or not? | Check if there {0} {1}.
    | {0} there {1} in the picture? | {0} there {1} in all? | There {0} {1}, yes or no?
    | Would you say there {0} {1}? | {0} there {1} here? | Do you think there {0} {1}?
    | Can you say if there {0} {1}? | Please check if there {0} {1}. | Verify that there {0} {1}.
    | Do you agree that there {0} {1}? | So there {0} {1}? | Tell me: {0} there {1}?
    | {0} there {1} in the video? | Am I right that there {0} {1}?
part =
    How many {0} are there? | How many {0} do you see? | How many {0} can you see?
    | Count the {0}. | What is the number of {0}? | Number of {0}? | How many {0} appear?
    | Tell me how many {0} there are. | How many {0} are shown? | Count all {0}.
    | How many {0} are in the picture? | How many {0} does the video show?
    | In total, how many {0} are there? | Can you count the {0}? | How many {0} are in the video?
    | Tell me the number of {0}. | Say how many {0} there are. | Count how many {0} there are.
    | What number of {0} is there? | How many {0} exist here? | Of {0}, how many are there?
    | How many {0} does the picture have? | Find all {0} and count them. | {0}: how many?
    | Give the number of {0}. | How many {0} can be seen?
which =
    Which object {0}? | What {0}? | Which shape {0}? | Which thing {0}? | Which one {0}?
    | Name the object that {0}. | Tell me which object {0}. | Which of the objects {0}?
    | What is the object that {0}? | Which figure {0}? | Name the thing that {0}.
    | Tell me what {0}. | Can you tell me which object {0}? | Say what {0}.
    | Say which one {0}. | Tell me the object that {0}. | Find the object that {0}.
    | Which is the one that {0}? | Name what {0}. | The thing that {0} is which?
    | Which of these {0}? | What is it that {0}? | Which is the thing that {0}?
    | Of the objects, which one {0}? | What do you see that {0}? | Please name the one that {0}.
    | Which item {0}? | The object that {0}, what is it?
""")
FORMS = {form: (*MORE.get(form, ()), *words) for form, words in {**WORDINGS, **LONE}.items()}
NOUNS = ("object", "shape", "thing", "figure")  # what a thing is called that is the only one
CLIP_KINDS = (
    "colour", "shape", "count", "direction", "speed", "position", "first", "number", "background",
    "exists", "relation", "compare", "where", "when", "describe", "followup",
)  # fmt: skip
STILL_KINDS = tuple(k for k in CLIP_KINDS if k not in ("direction", "speed", "first", "when"))
OUTSIDE = "outside"  # kind of questions, or of media, that get the refusal
ABSENT = "absent"  # kind of questions that take for granted what is not there
# Kinds of questions put as people put them: about "it" or "the object", which may be several or
# none; that name a thing by its shape or colour alone; with yes or no about a movement, or about a
# colour, a shape or how many there are; how many are of one sort; which one moves or lies so; any
# of them as a clause behind what people say first.
LOOSE = ALONE, SHORT, MOVES, ATTRIBUTE, PART, WHICH, SAID = (
    "alone", "short", "moves", "attribute", "part", "which", "said",
)  # fmt: skip
START, END, STILL = " at the start", " at the end", ""


@dataclass(frozen=True)
class SceneItem(Fact):
    """A question with its answer, perhaps the second turn of a conversation."""

    form: str = ""  # row of FORMS; the kind if empty
    before: SceneItem | None = None

    def worded(self, number: int) -> str:
        """The question in one wording of its kind."""
        if self.kind == SAID:
            return saying(self.form, number).format(*self.slots)
        words = FORMS[self.form or self.kind]
        return words[number % len(words)].format(*self.slots)

    def wordings(self, kept: bool) -> range:
        """Numbers of the wordings that training shows, or of those kept back."""
        if self.kind == SAID:
            return sayings(self.form, kept)
        count = len(FORMS[self.form or self.kind])
        return range(count - KEPT, count) if kept else range(count - KEPT)


def drawn(rng: np.random.Generator, names: Sequence[str], most: int) -> list[str]:
    """Some of the names, at most so many, in random order."""
    return [names[i] for i in rng.permutation(len(names))[:most]]


def plural(name: str) -> str:
    """Several of a name: circles, crosses."""
    return f"{name}{'es' if name.endswith(('s', 'x', 'ch', 'sh')) else 's'}"


def spelled(text: str, rng: np.random.Generator) -> str:
    """The text in British or American spelling."""
    if rng.random() < 0.5:
        for british, american in AMERICAN.items():
            text = text.replace(british, american)
    return text


def varied(text: str, rng: np.random.Generator) -> str:
    """The text in one of the ways people type it: spelling, words, phrases around it."""
    text = spelled(text, rng)
    text = spoken(text, rng)
    if rng.random() < 0.4:
        text = _SAYABLE.sub(lambda found: _alike(found[0], rng), text)
    if rng.random() < 0.15:
        text = PREFIXES[int(rng.integers(len(PREFIXES)))] + text
    if rng.random() < 0.1:
        return text.rstrip(".") + SUFFIXES[int(rng.integers(len(SUFFIXES)))]
    return text.rstrip("?.") if rng.random() < 0.15 else text


def _alike(word: str, rng: np.random.Generator) -> str:
    return one((word, *ALIKE[word]), rng)
