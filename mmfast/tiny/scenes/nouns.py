"""Everyday nouns for what is outside the world; none of them could mean a thing that is in it."""

import numpy as np


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# Words that training never shows.
KEPT = _words("""
acorn airport ant apron attic badge banker barn basket bathtub beard beetle belt blanket bracelet
bush butterfly cabbage canoe captain carrot cave cherry chicken chin church cinema cliff coin
cottage cousin cushion daisy dentist desert dolphin donkey dragon dust eagle elbow emperor fairy
feather ferry fireman flag flute forest frog ghost gold grape grass guest hair hammer hay
helicopter hill honey igloo jacket jewel jug kite lawn leaf lettuce lizard magazine magnet mirror
museum neck needle notebook ocean onion owl palace parrot peach pepper pie pond potato princess
puddle puppy ribbon ring robot sand sausage scarf scissors shark shoulder sky sock sugar sun
sunglasses sweater taxi teapot tent thumb tie tongue towel toy trumpet turtle van vase watermelon
whale wolf wrist yacht zebra
""")
COMMON = _words("""
actor air aircraft alarm alley alligator ambulance angel animal ankle antenna apartment aquarium
arm armchair army arrow ashtray athlete aunt author avenue axe baby back backpack bakery balcony
balloon banana band bandage bank bar barber barrel baseball basketball bat bathroom battery battle
bay beak bean bedroom bee bell bench berry bicyclist bike bin biscuit blade blouse board boot bowl
boxer bra bracket brain branch breakfast brick bride broom brush bubble bucket buffalo building
bull bulb bullet bumper burger butcher butter button cabin cabinet cable cactus cage calculator
calendar camel campfire canal candle candy cannon cap cape card cardigan cargo carpenter
carriage cart cashier cathedral ceiling celery cello cement chain chalk champion cheek chef chess
chest chimney chip choir cigarette city clay cloth clothes coach coal coast cockpit cocktail
collar college comb comet concert cone container cookie cop copper cord corn costume couch counter
country couple court cowboy crab crane crayon cream creature crew cricket crocodile crow crowd
crown crystal cucumber cupboard curry customer cyclist dam deck deer desk detective dice dinner
dinosaur dish diver dock doll dollar doorbell dragonfly drawer dress driveway drone drummer dryer
dustbin ear earring earth editor eel elevator embroidery enemy envelope escalator eye eyebrow face
factory family fan farm fence field finger fire firefighter fireplace fireworks fist flame flask
fleet flood flour fly food foot football fork fountain fox freezer fruit fur gallery game garage
garlic gas gate gear giant gift girlfriend glass glasses globe goal goat goose gorilla grandfather
grandmother grill groom group guard gun gym hall halloween hand handbag handle harbour hawk head
headphones heel hen herb hero highway hip hippo hockey hole holiday home hook horn hospital host
hotel human hunter husband ice iceberg infant ink insect iron island jam jar jeans jeep jet
jewellery joker journalist judo juice jungle kangaroo kid kitchen kitten knee knight knot label
lake lamb land lane lantern lap leader leather leg lemonade library lid light lighthouse lightning
lime lip lipstick liquid lobster lock logo lorry luggage lunch machine maid mail mailbox manager
map market mask mast mat match meal meat medal melon menu mermaid metal meteor microphone
microscope microwave mill mine minister missile model mobile money monster moon moose mop mosquito
moth motor motorbike motorcycle mouth mud mug muscle mushroom musician nail napkin neighbour nest
net newspaper night noodle nose nut oak oar office officer oil olive opera orchestra ostrich
outfit owner package paddle page pain paint painting pair pan panda pants parachute parcel parent
parking passenger pasta path patient paw peacock peanut pear pebble pedestrian penguin people
performer petrol pet photographer pigeon pillow pin pineapple pipe pirate planet plant plate
platform plug plum pocket poet poker pole police pony pool porch poster pot powder priest prince
prison prisoner professor pump pumpkin purse puzzle pyjamas racket railway rain rainbow rat razor
referee reindeer restaurant rhino rice rider rifle rock roller room rooster root rope rug ruler
runner saddle sailor salad salmon salt sandal sauce saucer saw scale scarecrow school scientist
scorpion screw seal seat secretary seed shadow shampoo shed shelf shell shield shop shore shorts
shovel shower shrimp sink skeleton ski skin skirt skull sled sleeve slipper smoke snail snow
snowman soap son spaceship spade spaghetti sparrow speaker spear spice spinach sponge spring
sprout squid stadium staff stage stairway stamp statue steak steam steering steel stem stick
stomach stone store stove stranger straw strawberry stream string submarine suit suitcase
supermarket surfer surgeon swan sweet swimmer swing sword syrup tablet tail tank tap target teeth
telephone telescope temple tennis theatre thief throat throne ticket tights tile tin toast toaster
toe toilet tomato tool tooth torch tortoise tourist town track trail trailer tram trap tray
treasure tribe trolley trousers trunk tube tulip tunnel turkey twin tyre uncle uniform university
valley vampire vegetable vehicle vest victim village villain volcano volleyball vulture waist
waitress wallet walnut wand wardrobe warrior wasp watch water waterfall wave wedding weed wheat
wheelbarrow wheelchair whip whiskey wife wig wind windmill wing witch wizard wood wool worker
world worm wrestler writer yoghurt zip zoo
""")


def invented(rng: np.random.Generator) -> str:
    """A word that could be one: consonants and vowels in turn."""
    ends = ("", "", "n", "r", "l", "s", "t", "ck", "m")
    some = ("b", "c", "d", "f", "g", "h", "j", "k", "l", "m", "n", "p", "r", "s", "t", "v", "w",
            "z", "bl", "br", "cl", "dr", "fl", "gr", "pl", "sk", "sl", "sn", "tr")  # fmt: skip
    vowels = ("a", "e", "i", "o", "u", "ee", "oo", "ai")
    parts = [some[int(rng.integers(len(some)))] + vowels[int(rng.integers(len(vowels)))]
             for _ in range(int(rng.integers(2, 4)))]  # fmt: skip
    return "".join(parts) + ends[int(rng.integers(len(ends)))]
