"""Passage question answering: a passage of random facts about one or two people, and questions about one fact."""
# ruff: noqa: E501 (template tables read better with one entry a line)

import random
from dataclasses import dataclass

from deepinfer.recipe.conversation import Message
from deepinfer.train.data import words as w
from deepinfer.train.data.dialogue import Dialogue, chat
from deepinfer.train.data.prompts import article

NOT_SAID = ["The passage does not say.", "The passage does not say that.", "The text does not say."]
NUMBERS = "zero one two three four five six seven eight nine ten eleven twelve".split()


@dataclass(frozen=True)
class Fact:
    """`{n}` is the person's name; the sentence, possible questions, the answer sentence and its key words."""

    topic: str
    sentence: str
    questions: tuple[str, ...]
    answer: str
    key: str


def _fact(r: random.Random, topic: str, key: str, sentences: list[str], questions: list[str], answer: str) -> Fact:
    return Fact(topic, r.choice(sentences).format(n="{n}", k=key), tuple(questions), answer.format(n="{n}", k=key), key)


def job(r: random.Random) -> Fact:
    return _fact(r, "job", article(r.choice(w.JOBS)), ["{n} is {k}.", "{n} works as {k}.", "{n} has been {k} for years."],
                 ["What is {n}'s job?", "What does {n} do for a living?", "What work does {n} do?"], "{n} is {k}.")  # fmt: skip


def town(r: random.Random) -> Fact:
    return _fact(r, "town", r.choice(w.TOWNS), ["{n} lives in {k}.", "{n}'s home is in {k}.", "{n} lives in a small house in {k}."],
                 ["Where does {n} live?", "In which town does {n} live?"], "{n} lives in {k}.")  # fmt: skip


def age(r: random.Random) -> Fact:
    return _fact(r, "age", str(r.randint(5, 90)), ["{n} is {k} years old.", "{n} turned {k} last week.", "{n}, who is {k} years old, likes to read."],
                 ["How old is {n}?", "What is {n}'s age?"], "{n} is {k} years old.")  # fmt: skip


def pet(r: random.Random) -> Fact:
    return _fact(r, "pet", article(r.choice(w.ANIMALS)), ["{n} has {k}.", "{n} keeps {k} as a pet.", "{n} takes care of {k}."],
                 ["What pet does {n} have?", "Which animal does {n} have?"], "{n} has {k}.")  # fmt: skip


def pet_name(r: random.Random) -> Fact:
    animal, name = (
        r.choice(w.ANIMALS),
        r.choice(
            [
                "Rex",
                "Coco",
                "Pip",
                "Biscuit",
                "Shadow",
                "Luna",
                "Tiger",
                "Bubbles",
                "Snow",
                "Ginger",
                "Pepper",
                "Star",
                "Button",
                "Rocket",
                "Misty",
            ]
        ),
    )
    return _fact(r, "pet name", name, [f"{{n}} has {article(animal)} called {{k}}.", f"{{n}}'s {animal} is called {{k}}."],
                 [f"What is the name of {{n}}'s {animal}?", f"What is {{n}}'s {animal} called?"], f"{{n}}'s {animal} is called {{k}}.")  # fmt: skip


def food(r: random.Random) -> Fact:
    return _fact(r, "food", r.choice(w.FOODS), ["{n} loves {k}.", "{n}'s favourite food is {k}.", "{n} eats {k} every day.", "{n} likes {k} more than any other food."],
                 ["What does {n} like to eat?", "What is {n}'s favourite food?"], "{n} likes {k}.")  # fmt: skip


def thing_colour(r: random.Random) -> Fact:
    thing = r.choice(w.OBJECTS)
    return _fact(r, "colour of the " + thing, r.choice(w.COLOURS), [f"{{n}} has a {{k}} {thing}.", f"{{n}}'s {thing} is {{k}}.", f"{{n}} bought a {{k}} {thing}."],
                 [f"What colour is {{n}}'s {thing}?", f"Which colour is the {thing} of {{n}}?"], f"{{n}}'s {thing} is {{k}}.")  # fmt: skip


def gets_up(r: random.Random) -> Fact:
    time = r.choice(
        [
            f"{r.randint(4, 11)} o'clock",
            f"{r.randint(4, 11)}:{r.choice(['15', '30', '45'])}",
            f"half past {r.choice(NUMBERS[4:11])}",
        ]
    )
    return _fact(r, "wake", time, ["{n} gets up at {k}.", "Every day, {n} wakes up at {k}."],
                 ["When does {n} get up?", "At what time does {n} wake up?"], "{n} gets up at {k}.")  # fmt: skip


def trip(r: random.Random) -> Fact:
    day, place = r.choice(w.DAYS), r.choice(w.PLACES)
    if r.random() < 0.5:
        return _fact(r, "trip", day, [f"{{n}} went to the {place} on {{k}}.", f"On {{k}}, {{n}} visited the {place}."],
                     [f"When did {{n}} go to the {place}?", f"On which day did {{n}} visit the {place}?"], f"{{n}} went to the {place} on {{k}}.")  # fmt: skip
    return _fact(r, "trip", "the " + place, [f"{{n}} went to {{k}} on {day}.", f"On {day}, {{n}} visited {{k}}."],
                 [f"Where did {{n}} go on {day}?", f"Which place did {{n}} visit on {day}?"], f"{{n}} went to {{k}} on {day}.")  # fmt: skip


def count(r: random.Random) -> Fact:
    thing = r.choice(
        [
            "brothers",
            "sisters",
            "cousins",
            "books",
            "chairs",
            "bicycles",
            "hats",
            "apples",
            "coins",
            "cats",
            "friends",
            "children",
            "clocks",
        ]
    )
    return _fact(r, "number of " + thing, r.choice(NUMBERS[2:] + [str(r.randint(2, 60))]), [f"{{n}} has {{k}} {thing}.", f"There are {{k}} {thing} in {{n}}'s house."],
                 [f"How many {thing} does {{n}} have?", f"How many {thing} are there in {{n}}'s house?"], f"{{n}} has {{k}} {thing}.")  # fmt: skip


def price(r: random.Random) -> Fact:
    thing = r.choice(w.OBJECTS)
    return _fact(r, "price of the " + thing, f"{r.randint(2, 99)} {r.choice(['dollars', 'euros', 'pounds'])}",
                 [f"{{n}} paid {{k}} for a {thing}.", f"{{n}} sold a {thing} for {{k}}."],
                 [f"How much was {{n}}'s {thing}?", f"What was the price of the {thing}?"], f"The {thing} was {{k}}.")  # fmt: skip


def lost(r: random.Random) -> Fact:
    thing, place = r.choice(w.OBJECTS), r.choice(w.PLACES)
    return _fact(r, "lost", place, [f"{{n}} lost {article(thing)} in the {{k}}.", f"{{n}} left {article(thing)} in the {{k}}."],
                 [f"Where did {{n}} lose the {thing}?", f"Where is the {thing} of {{n}}?"], f"{{n}} lost the {thing} in the {{k}}.")  # fmt: skip


def born(r: random.Random) -> Fact:
    return _fact(r, "born", r.choice(w.MONTHS), ["{n} was born in {k}.", "{n}'s birthday is in {k}."],
                 ["In which month was {n} born?", "When is {n}'s birthday?"], "{n}'s birthday is in {k}.")  # fmt: skip


def mood(r: random.Random) -> Fact:
    return _fact(r, "mood", r.choice(w.MOODS), ["{n} is very {k}.", "{n} felt {k} today.", "Everyone says that {n} is {k}."],
                 ["How did {n} feel?", "What kind of person is {n}?"], "{n} is {k}.")  # fmt: skip


def hobby(r: random.Random) -> Fact:
    key = r.choice(
        "playing chess|swimming|painting|singing|fishing|reading|dancing|cooking|running|knitting|skating|gardening|playing the piano|riding a bicycle|taking photographs".split(
            "|"
        )
    )
    return _fact(r, "hobby", key, ["{n} enjoys {k}.", "In the evening, {n} likes {k}.", "{n}'s hobby is {k}."],
                 ["What is {n}'s hobby?", "What does {n} enjoy?"], "{n} enjoys {k}.")  # fmt: skip


def friend(r: random.Random) -> Fact:
    return _fact(r, "friend", "{f}", ["{n}'s best friend is {k}.", "{n} has a good friend called {k}."],
                 ["Who is {n}'s best friend?", "Who is the friend of {n}?"], "{n}'s best friend is {k}.")  # fmt: skip


FACTS = [
    job,
    town,
    age,
    pet,
    pet_name,
    food,
    thing_colour,
    gets_up,
    trip,
    count,
    price,
    lost,
    born,
    mood,
    hobby,
    friend,
]

FORMATS = [
    "{p}\n\n{q}", "{p}\n\nQuestion: {q}", "Passage: {p}\nQuestion: {q}", "{q}\n\n{p}", "Read the text and answer.\n\n{p}\n\n{q}",
    "Read the passage and answer the question.\n\nPassage: {p}\n\nQuestion: {q}", "Text:\n{p}\n\nAnswer this: {q}", "{p} {q}",
    "According to the passage, answer the question.\n\n{p}\n\n{q}", "Here is a text: {p}\n\nMy question is: {q}",
]  # fmt: skip


def passage_qa(r: random.Random, held_out: bool = False) -> Dialogue:
    """A question about one fact of a passage of 2 to 6 sentences; one in seven is not answered by the passage."""
    pool = r.sample(w.names(held_out), 4)
    people = pool[: r.choice([1, 2, 2, 3])]
    left_out = r.choice([pet, pet_name])
    facts = [f for f in FACTS if f is not left_out]  # both would make the pet ambiguous
    kinds = r.sample(facts, min(r.randint(2, 6), len(facts)))
    told = []
    for make in kinds:
        fact, name = make(r), r.choice(people)
        fill = {"n": name, "f": r.choice([n for n in pool if n != name])}
        told.append((fact, fact.sentence.format(**fill), fill))
    passage = " ".join(sentence for _, sentence, _ in told)
    if r.random() < 0.15:
        passage = f"It was a {r.choice(w.WEATHER)} {r.choice(w.TIMES)}. " + passage
    if r.random() < 1 / 7:
        fact = r.choice([f for f in facts if f not in kinds])(r)
        question = r.choice(fact.questions).format(n=r.choice(people))
        answer = expected = r.choice(NOT_SAID)
        reasoning = "The passage does not give this."
    else:
        fact, sentence, fill = r.choice(told)
        question = r.choice(fact.questions).format(**fill)
        expected = fact.key.format(**fill)
        answer = fact.answer.format(**fill)
        reasoning = f"The passage says: {sentence}"
    user = r.choice(FORMATS).format(p=passage, q=question)
    system = ""
    before: tuple[Message, ...] = ()
    if r.random() < 0.12:
        system, user = f"Answer from this text only.\n\n{passage}", question
    elif r.random() < 0.25 and len(told) > 2:  # a first question about the same passage
        other, _, other_fill = r.choice(told)
        first = r.choice(FORMATS).format(p=passage, q=r.choice(other.questions).format(**other_fill))
        before = (Message("user", first), Message("assistant", other.answer.format(**other_fill)))
        user = question
    return chat("passage", r, user, answer, reasoning, system, before, expected=expected)
