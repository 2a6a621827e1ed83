"""Questions of everyday life, which the world of the scenes has no answer to."""

from __future__ import annotations

import re

import numpy as np

from mmfast.tiny.scenes import nouns
from mmfast.tiny.scenes.questions import plural
from mmfast.tiny.scenes.wordings import one
from mmfast.tiny.video.questions import parse_grammar

_SLOT = r"\{(\w+)\}"
INVENTED = 0.25  # share of the nouns that no list of words has

_RULES = parse_grammar("""
asked =
    What kind of {noun} is this? | What sort of {noun} is that? | What type of {noun} is shown?
    | Which {noun} is this? | Which model of {noun} is it? | What species of {noun} is it?
    | What is in the {noun}? | What's inside the {noun}? | What is behind the {noun}?
    | What's on top of the {noun}? | What is the {noun} made of? | What is this {noun} used for?
    | What is the {noun} doing? | What does this {noun} cost? | What's the {noun} called?
    | What is the name of this {noun}? | Read the {noun} number. | Read what the {noun} says.
    | What is written on the {noun}? | What does the {noun} say about the {noun}?
    | What is the number on the {noun}? | What is the {nth} {noun}? | Which letter comes {nth}?
    | What is the {nth} word on the {noun}? | Summarise this {noun}. | Rewrite the {noun} for me.
    | Translate this {noun}. | Explain this {noun}. | Describe the {noun} and the {noun}.
    | Compare the {noun} with the {noun}. | List all {nouns}. | Count the {nouns}.
    | How many {nouns} does the {noun} have? | How many {nouns} can be seen?
    | How many {nouns} are left? | How many of the {nouns} are {adjective}?
    | What colour are the {nouns}? | What color is the {noun}'s {noun}?
    | Which colour are the {nouns} of the {noun}? | Are the {nouns} {adjective}?
    | Is the {noun} {adjective}? | Is this {noun} {adjective}? | Is this a {noun}?
    | Is that a {noun} or a {noun}? | Are there any {nouns}? | Do the {nouns} look {adjective}?
    | Who owns the {noun}? | Who is next to the {noun}? | Who wears the {noun}?
    | Whose {noun} is it? | Why is the {noun} {adjective}? | Why are the {nouns} so {adjective}?
    | Why is there a {noun}? | When was the {noun} built? | When does the {noun} open?
    | Where does the {noun} come from? | Where are the {nouns}? | Where's the nearest {noun}?
    | How do I clean a {noun}? | How do you use the {noun}? | How much {noun} is in the {noun}?
    | How {adjective} is the {noun}? | How long is the {noun}? | What size is the {noun}?
    | What time does the {noun} start? | What day is it today? | What is {sum} times {sum}?
    | What is {sum} plus {sum}? | What's {sum} minus {sum}? | What is {sum} divided by {sum}?
    | What is half of {sum}? | Is {sum} a prime number? | How many {nouns} are in a {noun}?
    | What happens to the {noun}? | What did the {noun} do then? | What will the {noun} do next?
    | What should I do with the {noun}? | Can you find the {noun}? | Can a {noun} swim?
    | Could you buy me a {noun}? | I want a {noun}. | I would like to see the {noun}.
    | My {noun} is {adjective}. | Please send the {noun} to my {noun}. | Remind me of the {noun}.
    | Draw a {noun}. | Show me the {noun}. | Zoom in on the {noun}. | Remove the {noun}.
    | Play the {noun} again. | What is your opinion on {nouns}? | What do you know about {nouns}?
    | Tell me about the {noun}. | What is the total on the {noun}? | What is the date of the {noun}?
    | What's the address of the {noun}? | What is the highest {noun}? | Which is the largest {noun}?
    | Which {noun} is {adjective}? | Which of the {nouns} is the {adjective} one?
    | Which company makes this {noun}? | Which city has this {noun}? | Which country is this {noun}?
    | Which page is the {noun} on? | Did the {noun} win? | Does the {noun} have a {noun}?
    | Does this {noun} work? | Will the {noun} fall? | Should I eat the {noun}?
    | The {noun} is on the {noun}. | What is there besides the {noun}? | {noun}? | {nouns}
    | Who takes the {noun}? | What comes after the {noun}? | What was the {noun} before?
    | What type of {noun} is on the {noun}? | What {noun} is this? | What {noun} is shown?
    | What {noun} is {adjective}? | What {noun} did {who} use? | Which {noun} does {who} like?
    | What color is the {noun}? | What colour is {whose} {noun}? | How many {nouns} does {who} have?
    | What is the {adjective} {noun}? | What is the {nth} thing that {who} can {verb}?
    | What does {who} {verb}? | What did {who} {verb}? | Does {who} {verb} the {noun}?
    | Can {who} {verb}? | Did {who} {verb} a {noun}? | Is {who} going to {verb}? | Who can {verb}?
    | Why does {who} {verb}? | Where does {who} {verb}? | How does {who} {verb} the {noun}?
    | When will {who} {verb}? | How do I {verb} a {noun}? | Should we {verb} it?
    | Please {verb} the {noun}. | {verb} the {noun}. | {verb} it. | {verb} to me.
    | I {verb} {nouns}. | Do you {verb}? | Do you have a {noun}? | Have you seen {whose} {noun}?
    | Is it {adjective}? | Is {who} {adjective}? | Was {who} {adjective}?
    | Is {whose} {noun} {adjective}? | Is there an {adjective} {noun}?
    | Is there a {noun} on the {noun}? | Is there a {noun}? | Is anything {adjective}?
    | Is everything {adjective}? | What looks {adjective} here? | What is the {noun} like?
    | What is the {noun} about? | What is the {noun} of the {noun}?
    | What are the {nouns} of this {noun}? | What is {whose} {noun}? | What's {whose} {noun}'s name?
    | What would you do with a {noun}? | What would {who} {verb}? | What will {who} say?
    | Where in the {noun} is the {noun}? | Where is {who}?
    | Which part of the {noun} is {adjective}? | How many {nouns} are {adjective}?
    | How many {nouns} in total? | How many people {verb}? | How {adjective} is {who}?
    | How far is the {noun}? | How often does {who} {verb}? | Describe the {adjective} {noun}.
    | Describe {whose} {noun}. | Describe {who}. | Tell me how to {verb}.
    | Tell {who} about the {noun}. | Name a {adjective} {noun}. | Find the {noun}.
    | Find a {adjective} {noun}. | Say something about {nouns}. | Say hello to {who}.
    | Give me a {noun}. | Let us {verb}. | Does the {noun} move to the {noun}? | {noun} or {noun}?
    | Which way does the {adjective} {noun} go? | Which way does {who} {verb}?
    | Which way to the {noun}? | Does {who} go left? | Where does the {noun} stand? | The {noun}.
    | What number does {who} have? | Is the number {adjective}? | Does the number {verb}?
    | Does the red {noun} {verb}? | What does the blue {noun} show? | Is the {noun} blue or green?
    | Is there a red {noun}? | Is there a green {noun} in the clip?
    | How many white {nouns} are there? | Do the yellow {nouns} {verb}? | Is the star {adjective}?
    | What does the triangle {verb}? | Can the square {verb}? | Who can {verb} the circle?
    | Is the cross a {noun}? | Hi. | Hey there! | Okay. | Thank you! | Why not? | Yes. | No.
    | Maybe. | What? | Really? | Hmm | Sorry. | Wait. | Please go on. | Never mind.
    | I am {adjective}. | You are {adjective}. | That is {adjective}. | How {adjective}!
    | Nice {noun}! | Good {noun}. | {noun} {noun} {noun} | {verb} {noun} | {adjective} {noun}
    | what about {nouns} | {edit} the {image}. | {edit} this {image} for me. | {edit} it.
    | Can you {edit} the {image}? | Please {edit} the {noun} in the {image}.
    | Make the {image} {adjective}. | Turn the {noun} into a {noun}. | Put a {noun} on the {noun}.
    | Who made this {image}? | Is this {image} {adjective}? | Where was this {image} taken?
    | What is the {noun} in the {image}? | What year is it? | Are you a {noun}?
    | Pretend to be a {noun}. | Act as my {noun}. | Repeat after me: {noun}.
    | What rhymes with {noun}? | How do you spell {noun}? | Define {noun}. | What does {noun} mean?
    | What is the opposite of {adjective}? | Write a {noun} about {nouns}.
    | Write {sum} words about the {noun}. | Give me {sum} {nouns}. | Add {sum} and {sum}.
    | How many {nouns} make a {noun}? | What's better, a {noun} or a {noun}?
    | Which is {adjective}, the {noun} or the {noun}? | How was your {noun}?
    | Do you know {who}? | I think {who} is {adjective}. | Is it true that {nouns} {verb}?
who =
    he | she | the man | the woman | my sister | someone | anyone | your friend | the {noun}
    | that {noun} | a {noun} | Peter | Maria | Doctor Smith | this person
whose =
    his | her | their | my | your | our | the {noun}'s | somebody's
verb =
    sing | cook | repair | paint | sell | buy | eat | drink | sleep | swim | fly | climb | dance
    | write | read | learn | teach | laugh | cry | smile | jump | throw | catch | hold | carry
    | push | pull | open | close | break | build | clean | wash | drive | ride | park | fight | kiss
    | hug | speak | whisper | shout | listen | hear | smell | taste | feel | think | believe
    | remember | forget | want | need | love | hate | like | pay | win | lose | play | work | study
    | travel | cut | bake | boil | fry | plant | grow | dig | burn | melt | freeze | knit | sew
    | type | calculate | translate | summarise | explain | pronounce | download | delete | install
    | cancel | order | book | call | text | email | wear | fit | hurt | heal | die | live | marry
    | vote
adjective =
    wooden | broken | tired | happy | expensive | empty | clean | dirty | wet | dry | ripe | sharp
    | famous | dangerous | hungry | heavy | closed | open | cheap | sweet | cold | warm | loud
    | asleep | angry | beautiful | safe | healthy | electric | Italian | modern | ancient | valid
    | tall | small | dangerous | wrong | correct | important | free | late | early | ready | alone
    | alive | dead | pregnant | sick | hidden | missing | upside down | noisy | salty | fresh
    | digital | wireless | legal | political | golden | transparent | striped | flat
edit =
    crop | rotate | sharpen | blur | resize | colour | invert | enhance | caption | frame
image =
    image | picture | photo | video | clip | screenshot | footage
nth =
    second | third | fourth | next | last
topic =
    access account advice age agency agreement algorithm allergy amount analysis anger answer
    apology appetite appointment argument article asset atom attempt attitude audience auction audio
    authority average balance ballot bankruptcy bargain beauty belief benefit beverage biology birth
    birthday blood bond bonus border boss brand budget bug business campaign cancer career category
    cause celebration cell century certificate challenge charge charity chemistry choice chord
    citizen claim class climate clue code comment commission committee community company complaint
    composer computation concept conclusion condition conference connection constitution consumer
    content contest contract conversation conviction copyright council coupon course courtroom
    credit crime crisis criticism culture currency curve customs damage data database date daughter
    deadline death debate debt decade decision definition degree delivery democracy density
    department deposit depth design diagnosis diagram diet difference diploma disaster discount
    disease dispute district document donation dose doubt draft dream drug duty economy education
    effect effort election electricity emergency emotion employee energy entertainment enthusiasm
    entrance environment episode era error estimate ethics event evidence exam example exception
    excuse exercise exhibition expense experience experiment expert explanation export expression
    fact failure faith fame fashion fat fault fee feeling fever file film finance fine fitness
    flavour flight folder formula fraction fracture freedom frequency friendship fuel fund future
    gender gene generation genre gesture government grade grammar gravity greeting growth guilt
    habit happiness harm headline health hearing heat heritage history hobby honour hope hour humour
    hurricane hypothesis idea identity illness image income index industry infection inflation
    information ingredient injury insurance interest interview invention investment invitation
    invoice issue job joke journal journey joy judgement justice keyword kindness knowledge law
    lawsuit lecture lesson level licence life limit literature loan logic loss love luck lyrics
    majority marriage mathematics maximum measure medication medicine meeting melody member memory
    mercy message method migraine millennium mind minimum minority minute misery mistake molecule
    moment month mood moral morning movie murder music mystery myth nation nature negotiation
    nickname noise novel nuisance nutrition obligation occupation odour offer opinion opponent
    opportunity option organ origin outcome oxygen page paragraph password patent patience payment
    peace penalty pension percentage performance permission personality pet phase philosophy phrase
    physics pill plan plot poem policy politics pollution population poverty power prayer prediction
    pressure price pride prize problem procedure process product profession profit programme
    progress project promise pronunciation proof property prophet protein protest proverb psychology
    punishment purchase purpose quality quantity quiz quote rate ratio reason receipt recipe record
    recovery refund region relationship religion rent repair report reputation request research
    reservation result revenge revenue reward rhythm risk role romance rumour safety salary sale
    sample sanction satellite schedule science secret section security semester sentence serial
    service session settings sex signal signature skill slogan smell society software solution song
    soul source speech spelling spirit statement statistics status story strategy strength stress
    subject subscription subtitle success suggestion summary summer sunset surgery surprise survey
    suspect syllable symptom system tactic talent task taste tax team technology temperature
    tendency tension term terror theory therapy thought title topic tour trade tradition traffic
    tragedy training transaction translation treatment trend trial trick trip trust truth tumour
    tutorial twist update username vacation vaccine value variable verdict verse victory virus
    vision visitor vitamin voice volume vote voucher wage war warning weakness wealth weather week
    weekend weight welfare width wifi winter wisdom wish witness woman work workout year youth zone
""")
_NOUNS = (*nouns.COMMON, *_RULES["topic"][0].split())


def everyday(rng: np.random.Generator) -> str:
    """A question or request; training alone shows them, with nouns that it may show."""

    def word(match: re.Match[str]) -> str:
        slot = match[1]
        if slot == "sum":
            return str(int(rng.integers(2, 1000)))
        if slot in _RULES:
            return re.sub(_SLOT, word, one(_RULES[slot], rng))
        noun = nouns.invented(rng) if rng.random() < INVENTED else one(_NOUNS, rng)
        return plural(noun) if slot == "nouns" else noun

    text = re.sub(_SLOT, word, one(_RULES["asked"], rng))
    return re.sub(r"\ba (?=[aeiou])", "an ", text[0].upper() + text[1:])
