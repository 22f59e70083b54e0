"""Write 1,000 minimal pairs about agreement and irregular verbs, as JSON lines in BLiMP's format.

    python examples/minimal_pairs/agreement.py OUT.jsonl

Ten UIDs of 100 pairs. The words are common in prose of the last two centuries, so that models of old books can be compared
too. Both sentences of a pair have the same number of words and differ in one. The 100 pairs are 50 couples: the word that is
wrong in one pair is right in the other ("The dogs bark." and "The dog barks."). So a score that ignores the context, such as
the frequency of words, is right in half of the pairs. The output is the same on every call.
"""

import argparse
import json
import random
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path

COUPLES = 50
SEED = 1

# Two pairs, each (good, bad): of the one number, gender or form, and of the other.
Couple = tuple[tuple[str, str], tuple[str, str]]

PEOPLE = [
    *[("boy", "boys"), ("girl", "girls"), ("soldier", "soldiers"), ("farmer", "farmers"), ("lady", "ladies")],
    *[("teacher", "teachers"), ("sailor", "sailors"), ("doctor", "doctors"), ("stranger", "strangers")],
    *[("servant", "servants"), ("friend", "friends"), ("captain", "captains"), ("prisoner", "prisoners")],
]
BYSTANDERS = [("horse", "horses"), ("guard", "guards"), ("old nurse", "old nurses"), ("priest", "priests")]
# (singular, plural, what can be said of them)
IRREGULAR = [
    ("man", "men", "at the gate|very happy|in great danger|not alone|ready to leave"),
    ("woman", "women", "at the window|very kind|in great danger|not alone|ready to leave"),
    ("child", "children", "asleep|very happy|in the garden|afraid of the dark|ready for school"),
    ("gentleman", "gentlemen", "at the door|very polite|in the library|tired of waiting|ready to leave"),
    ("goose", "geese", "in the yard|very noisy|near the pond|afraid of the dog"),
    ("ox", "oxen", "in the field|very strong|near the barn|tired of the work"),
    ("mouse", "mice", "in the kitchen|very quiet|under the table|afraid of the cat"),
]
STATES = [
    *["very tired", "ready to leave", "in great danger", "afraid of the storm", "glad of the news", "not at home"],
    *["late for dinner", "in the garden", "at the door", "full of hope"],
]
DEEDS = [
    *["gone to the village", "lost the way", "come home at last", "forgotten the promise", "seen the fire"],
    *[
        "told the truth",
        "left the room",
        "found a good place to rest",
        "heard the story before",
        "taken the wrong road",
    ],
]
HABITS = [
    *["walks|walk to church every Sunday", "knows|know the whole story", "lives|live near the river"],
    *["wants|want a better answer", "sits|sit by the fire", "sings|sing in the evening", "works|work until dark"],
    *["hopes|hope for better weather", "writes|write a letter every week", "speaks|speak of the war"],
]
OBJECTS = [
    *[("letter", "letters"), ("book", "books"), ("picture", "pictures"), ("house", "houses"), ("garden", "gardens")],
    *[("flower", "flowers"), ("ring", "rings"), ("chair", "chairs"), ("bridge", "bridges"), ("story", "stories")],
]
NOTICED = ["remembered", "liked", "described", "admired", "wanted to see", "looked at", "noticed"]
LOOKS = ["old", "little", "strange", "beautiful", "famous", "simple"]
FEMININE = {"lady": "herself", "girl": "herself", "queen": "herself", "mother": "herself", "sister": "herself"}
MASCULINE = {"king": "himself", "boy": "himself", "father": "himself", "brother": "himself", "monk": "himself"}
MAN_AND_WOMAN = [
    *[("king", "queen"), ("boy", "girl"), ("father", "mother"), ("brother", "sister"), ("prince", "princess")],
    *[("husband", "wife"), ("uncle", "aunt"), ("old man", "old woman")],
]
ON_ONESELF = [
    *["blamed {} for the mistake", "saw {} in the glass", "asked {} the same question", "warmed {} by the fire"],
    *["defended {} with courage", "hid {} in the forest", "dressed {} in great haste", "proved {} right"],
]
# (past, participle, objects). Without forms that older prose also uses in the other place, such as "was forgot" and "he begun".
VERBS = [
    ("wrote", "written", "letter|book|poem|answer"),
    ("took", "taken", "money|key|horse|book"),
    ("broke", "broken", "window|glass|chair|lock"),
    ("gave", "given", "answer|order|signal|money"),
    ("chose", "chosen", "place|horse|road|book"),
    ("stole", "stolen", "horse|money|ring|picture"),
    ("ate", "eaten", "bread|apple|cake|fish"),
    ("drew", "drawn", "map|picture|plan|line"),
    ("saw", "seen", "light|ship|fire|smoke"),
    ("threw", "thrown", "stone|rope|ball|spear"),
    ("wore", "worn", "coat|hat|ring|crown"),
    ("tore", "torn", "letter|paper|coat|flag"),
    ("drove", "driven", "carriage|cart|wagon|coach"),
]


def determiner_noun() -> Iterator[Couple]:
    for (one, _), verb, (thing, things), (this, these) in product(
        PEOPLE, NOTICED, OBJECTS, (("this", "these"), ("that", "those"))
    ):
        start = f"The {one} {verb}"
        yield (
            (f"{start} {this} {thing}.", f"{start} {these} {thing}."),
            (f"{start} {these} {things}.", f"{start} {this} {things}."),
        )


def determiner_adjective_noun() -> Iterator[Couple]:
    for (one, _), verb, look, (thing, things), (this, these) in product(
        PEOPLE, NOTICED, LOOKS, OBJECTS, (("this", "these"), ("that", "those"))
    ):
        start = f"The {one} {verb}"
        yield (
            (f"{start} {this} {look} {thing}.", f"{start} {these} {look} {thing}."),
            (f"{start} {these} {look} {things}.", f"{start} {this} {look} {things}."),
        )


def of_number(one: str, several: str, singular: str, plural: str, rest: str) -> Couple:
    """Subjects of both numbers before a verb of both numbers."""
    return (
        (f"The {one} {singular} {rest}.", f"The {one} {plural} {rest}."),
        (f"The {several} {plural} {rest}.", f"The {several} {singular} {rest}."),
    )


def subject_verb_be() -> Iterator[Couple]:
    for person, state, be in product(PEOPLE, STATES, (("is", "are"), ("was", "were"))):
        yield of_number(*person, *be, state)


def subject_verb_have() -> Iterator[Couple]:
    for person, deed in product(PEOPLE, DEEDS):
        yield of_number(*person, "has", "have", deed)


def subject_verb_present() -> Iterator[Couple]:
    for person, habit in product(PEOPLE, HABITS):
        verbs, _, rest = habit.partition(" ")
        yield of_number(*person, *verbs.split("|"), rest)


def subject_verb_across_prepositional_phrase() -> Iterator[Couple]:
    """The noun before the verb has the other number than the subject."""
    for (one, several), place, (other, others), state, (singular, plural) in product(
        PEOPLE, ("near", "beside", "behind", "with"), BYSTANDERS, STATES, (("is", "are"), ("was", "were"))
    ):
        first, second = f"The {one} {place} the {others}", f"The {several} {place} the {other}"
        yield (
            (f"{first} {singular} {state}.", f"{first} {plural} {state}."),
            (f"{second} {plural} {state}.", f"{second} {singular} {state}."),
        )


def subject_verb_irregular_plural() -> Iterator[Couple]:
    for (one, several, states), be in product(IRREGULAR, (("is", "are"), ("was", "were"))):
        for state in states.split("|"):
            yield of_number(one, several, *be, state)


def reflexive_number() -> Iterator[Couple]:
    for (noun, pronoun), deed in product((MASCULINE | FEMININE).items(), ON_ONESELF):
        one, several = f"The {noun} {deed}.", f"The {'ladies' if noun == 'lady' else f'{noun}s'} {deed}."
        yield (
            (one.format(pronoun), one.format("themselves")),
            (several.format("themselves"), several.format(pronoun)),
        )


def reflexive_gender() -> Iterator[Couple]:
    for (man, woman), deed in product(MAN_AND_WOMAN, ON_ONESELF):
        of_man, of_woman = f"The {man} {deed}.", f"The {woman} {deed}."
        yield (
            (of_man.format("himself"), of_man.format("herself")),
            (of_woman.format("herself"), of_woman.format("himself")),
        )


def irregular_past_participle() -> Iterator[Couple]:
    for (one, _), (past, participle, objects) in product(PEOPLE, VERBS):
        for thing in objects.split("|"):
            passive = f"The {thing} was {{}} by the {one}."
            active = f"The {one} {{}} the {thing}."
            yield (
                (passive.format(participle), passive.format(past)),
                (active.format(past), active.format(participle)),
            )


# UID -> (linguistics_term, all couples). The terms are BLiMP's.
UIDS = {
    "determiner_noun": ("determiner_noun_agreement", determiner_noun),
    "determiner_adjective_noun": ("determiner_noun_agreement", determiner_adjective_noun),
    "subject_verb_be": ("subject_verb_agreement", subject_verb_be),
    "subject_verb_have": ("subject_verb_agreement", subject_verb_have),
    "subject_verb_present": ("subject_verb_agreement", subject_verb_present),
    "subject_verb_across_prepositional_phrase": (
        "subject_verb_agreement",
        subject_verb_across_prepositional_phrase,
    ),
    "subject_verb_irregular_plural": ("subject_verb_agreement", subject_verb_irregular_plural),
    "reflexive_number": ("anaphor_agreement", reflexive_number),
    "reflexive_gender": ("anaphor_agreement", reflexive_gender),
    "irregular_past_participle": ("irregular_forms", irregular_past_participle),
}


def records() -> Iterator[dict[str, str]]:
    """Yield the fields of each pair, UID by UID."""
    for seed, (uid, (term, all_couples)) in enumerate(UIDS.items(), start=SEED):
        couples = random.Random(seed).sample(list(all_couples()), COUPLES)
        for number, (good, bad) in enumerate(pair for couple in couples for pair in couple):
            yield {
                "sentence_good": good,
                "sentence_bad": bad,
                "UID": uid,
                "linguistics_term": term,
                "pairID": str(number),
            }


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description="Write 1,000 minimal pairs about agreement and irregular verbs."
    )
    parser.add_argument("out", metavar="OUT.jsonl", type=Path, help="file of JSON lines to write, in BLiMP's format")
    out = parser.parse_args().out
    lines = "".join(json.dumps(record) + "\n" for record in records())
    try:
        out.write_text(lines, encoding="utf-8")
    except OSError as error:
        sys.exit(f"{out} cannot be written ({error.strerror}): give another path")
    print(f"{lines.count(chr(10))} pairs: {out}")


if __name__ == "__main__":
    main()
