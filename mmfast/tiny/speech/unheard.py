"""Sound that is not to be understood: other languages, noise, hum, knocks and near silence."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mmfast.tiny.speech.recordings import RATE, EspeakVoice, Line, noise
from mmfast.tiny.speech.text import HEARD_PITCHES, HEARD_SPEEDS

# Everyday words, by the voice of espeak-ng that says them.
LANGUAGES = {
    "de": "der hund geht heute nicht in die schule wir haben morgen zeit wo ist mein buch und "
    "warum kommt das wetter immer so spät ich möchte bitte ein glas wasser trinken danke schön",
    "fr": "le chat mange une pomme dans la maison nous sommes très contents où est mon livre "
    "et pourquoi il pleut toujours je voudrais un verre d'eau merci beaucoup bonjour madame",
    "es": "el perro come una manzana en la casa mañana vamos a la playa dónde está mi libro y por "
    "qué siempre llueve quiero un vaso de agua muchas gracias buenos días señora",
    "it": "il gatto mangia una mela nella casa domani andiamo al mare dove sta il mio libro e "
    "perché piove sempre vorrei un bicchiere di acqua grazie mille buongiorno signora",
    "pt": "o gato come uma maçã na casa amanhã vamos para a praia onde está o meu livro e por "
    "que chove sempre quero um copo de água muito obrigado bom dia senhora",
    "nl": "de hond gaat vandaag niet naar school wij hebben morgen tijd waar is mijn boek en "
    "waarom komt het weer altijd zo laat ik wil graag een glas water drinken dank je wel",
    "pl": "pies nie idzie dzisiaj do szkoły jutro mamy czas gdzie jest moja książka i dlaczego "
    "zawsze pada deszcz poproszę szklankę wody dziękuję bardzo dzień dobry",
    "sv": "hunden går inte till skolan idag vi har tid imorgon var är min bok och varför kommer "
    "alltid regnet så sent jag vill gärna ha ett glas vatten tack så mycket god dag",
    "tr": "köpek bugün okula gitmiyor yarın zamanımız var kitabım nerede ve neden hep yağmur "
    "yağıyor bir bardak su istiyorum çok teşekkür ederim günaydın efendim",
    "fi": "koira ei mene tänään kouluun meillä on huomenna aikaa missä on minun kirjani ja miksi "
    "aina sataa haluaisin lasin vettä kiitos paljon hyvää päivää",
    "cs": "pes dnes nejde do školy zítra máme čas kde je moje kniha a proč vždycky prší chtěl bych "
    "sklenici vody děkuji moc dobrý den paní",
    "hu": "a kutya ma nem megy iskolába holnap van időnk hol van a könyvem és miért esik mindig az "
    "eső kérek egy pohár vizet köszönöm szépen jó napot",
    "id": "anjing itu tidak pergi ke sekolah hari ini besok kita punya waktu di mana buku saya dan "
    "mengapa selalu hujan saya mau segelas air terima kasih banyak selamat pagi",
    "sw": "mbwa haendi shuleni leo kesho tuna wakati kitabu changu kiko wapi na kwa nini mvua "
    "inanyesha kila siku nataka glasi ya maji asante sana habari za asubuhi",
}
SECONDS = (0.4, 4.0)


def foreign(rng: np.random.Generator) -> Line:
    """A few words of another language, and its voice."""
    names = list(LANGUAGES)
    name = names[int(rng.integers(len(names)))]
    words = LANGUAGES[name].split()
    start, many = int(rng.integers(len(words) - 3)), int(rng.integers(3, 10))
    part = words[start : start + many] if rng.random() < 0.7 else rng.choice(words, many).tolist()
    variant = ("", "+m1", "+m3", "+m7", "+f2", "+f3", "+f4")[int(rng.integers(7))]
    rate, pitch = rng.integers(*HEARD_SPEEDS), rng.integers(*HEARD_PITCHES)
    return " ".join(part) + ".", EspeakVoice(name + variant, int(rate), int(pitch))


def is_foreign(voice: EspeakVoice) -> bool:
    """Test if a voice speaks another language."""
    return voice.name.split("+")[0] in LANGUAGES


def clatter(rng: np.random.Generator) -> NDArray[np.float32]:
    """Sound that nobody said `[n]` at 16 kHz."""
    count = int(rng.uniform(*SECONDS) * RATE)
    time, kind = np.arange(count) / RATE, int(rng.integers(5))
    found = noise(count, float(rng.uniform(0, 1.2)), rng) * 10 ** rng.uniform(-4, -0.8)
    if kind == 1:  # hum or a whistle
        found = 0.1 * found + _tones(time, rng)
    elif kind == 2:  # knocks
        beats = rng.random(count) < 4 / RATE
        found = 0.05 * found + np.convolve(beats, np.exp(-np.arange(800) / 120))[:count] * 0.5
    elif kind == 3:  # noise that comes and goes as syllables do
        found *= np.clip(np.sin(2 * np.pi * rng.uniform(1, 6) * time + rng.uniform(0, 6)), 0, 1)
    elif kind == 4:  # a few notes
        notes = (np.floor(time * rng.uniform(2, 5)) * 7 % 12).astype(int)
        pitch = 220 * 2 ** (notes / 12)
        found = 0.05 * found + 0.2 * np.sin(2 * np.pi * np.cumsum(pitch) / RATE)
    return np.clip(found, -1, 1).astype(np.float32)


def _tones(time: NDArray[np.float64], rng: np.random.Generator) -> NDArray[np.float64]:
    base = float(rng.choice([50, 60, 100, 440, 1000, rng.uniform(80, 3000)]))
    loud = 10 ** rng.uniform(-2.5, -0.7)
    many = range(1, int(rng.integers(2, 6)))
    return np.asarray(loud * sum(np.sin(2 * np.pi * base * k * time) / k for k in many))
