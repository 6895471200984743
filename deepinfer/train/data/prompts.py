"""Seeded prompts for the text sampler: (user prompt, forced opening of the answer). Item i depends on (seed, i) only."""
# ruff: noqa: E501 (template tables read better with one entry a line)

import random
import re

from deepinfer.train.data.words import (
    ANIMALS,
    COLOURS,
    DAYS,
    FOODS,
    HOWTO,
    JOBS,
    MONTHS,
    MOODS,
    NAMES,
    OBJECTS,
    PLACES,
    THEMES,
    TIMES,
    TOPICS,
    TOWNS,
    WEATHER,
)  # fmt: skip


def article(word: str) -> str:
    return ("an " if word[0] in "aeiou" or word == "honest" else "a ") + word


def theme(r: random.Random) -> str:
    """A plot such as 'follows a fox into the orchard'."""
    text = r.choice(THEMES)
    for slot, words in (("NOUN", OBJECTS), ("ANIMAL", ANIMALS), ("PLACE", PLACES), ("COLOUR", COLOURS), ("JOB", JOBS)):
        while slot in text:
            text = text.replace(slot, r.choice(words), 1)
    return re.sub(r"\ba(?= [aeiou])", "an", text)


def story(r: random.Random) -> tuple[str, str]:
    name, mood, place = r.choice(NAMES), r.choice(MOODS), r.choice(PLACES)
    who = r.choice([name, f"{article(mood)} {r.choice(JOBS)} named {name}", f"a child named {name}",
                    f"{article(r.choice(ANIMALS))} named {name}", f"two friends, {name} and {r.choice(NAMES)},"])  # fmt: skip
    kind = r.choice(["short story", "short story for children", "simple story", "bedtime story", "funny story",
                     "short mystery", "story in simple words", "very short story", "story about everyday life",
                     "gentle story", "story with a happy ending", "story with a surprising ending"])  # fmt: skip
    prompt = f"{r.choice(['Write', 'Tell me', 'Please write', 'Give me'])} a {kind} about {who} who {theme(r)}."
    if r.random() < 0.5:
        prompt += f" It takes place in {r.choice(TOWNS) if r.random() < 0.4 else 'a ' + place}."
    if r.random() < 0.3:
        prompt += f" Use the words '{r.choice(OBJECTS)}', '{r.choice(FOODS)}' and '{r.choice(MOODS)}'."
    openings = [
        "", "", f"{name} ", f"One {r.choice(WEATHER)} {r.choice(TIMES)}, ", f"It was {r.choice(DAYS)}, and {name} ",
        f"Every {r.choice(DAYS)}, {name} ", f'"{r.choice(["Wait", "Look", "Help", "Come here", "Listen", "Oh no", "Yes"])}',
        f"The {r.choice(OBJECTS)} ", f"In the {place}, ", f"Nobody in {r.choice(TOWNS)} ", f"There was once {article(mood)} ",
        f"{name} had never ", f"When {name} ", f"The {r.choice(ANIMALS)} ", f"Long ago, in {r.choice(TOWNS)}, ",
        f"{name} was {mood}. ", f"At the end of {r.choice(MONTHS)}, ", f"The {r.choice(COLOURS)} {r.choice(OBJECTS)} ",
    ]  # fmt: skip
    return prompt, r.choice(openings)


def description(r: random.Random) -> tuple[str, str]:
    thing = r.choice([
        f"{article(r.choice(PLACES))} on {article(r.choice(WEATHER))} {r.choice(TIMES)}",
        f"{article(r.choice(MOODS))} {r.choice(JOBS)}", f"{article(r.choice(COLOURS))} {r.choice(OBJECTS)}",
        f"{article(r.choice(ANIMALS))} in {article(r.choice(PLACES))}", f"a room with {article(r.choice(OBJECTS))} in it",
        f"a meal of {r.choice(FOODS)} and {r.choice(FOODS)}", f"a street in {r.choice(TOWNS)} in {r.choice(MONTHS)}",
        f"the working day of {article(r.choice(JOBS))}",
    ])  # fmt: skip
    how = r.choice(["Describe {} in one paragraph.", "Write a short description of {}.", "Describe {} in simple words.",
                    "Write five sentences about {}.", "What might you see, hear and smell near {}?"])  # fmt: skip
    return how.format(thing), ""


def explanation(r: random.Random) -> tuple[str, str]:
    topic = r.choice(TOPICS)
    how = r.choice([
        "Explain {} to a child.", "Write a short paragraph about {}.", "Tell me three facts about {}.", "What should I know about {}?",
        "Explain {} in simple words.", "Why is it useful to know about {}?", "Give a short introduction to {}.",
        "Write a short article about {}.", "Answer in two or three sentences: what is important about {}?",
        "Write a question about {} and answer it.", "What are common mistakes people make about {}?",
        "Compare {} and {}.", "How are {} and {} different?", "How are {} and {} connected?",
        "Give a few examples to explain {}.", "Write a short lesson about {} for young students.",
    ])  # fmt: skip
    return how.format(topic, r.choice(TOPICS)), r.choice(["", "", "", f"{topic[0].upper()}{topic[1:]} "])


def howto(r: random.Random) -> tuple[str, str]:
    how = r.choice(["How do I {}?", "Explain how to {}.", "Give me a few tips to {}.", "List the steps to {}.",
                    "I want to {}. Where do I start?", "Teach me to {} in simple words.", "What do I need to {}?",
                    "My friend {n} wants to {}. What would you advise?", "Is it hard to {}?"])  # fmt: skip
    return how.format(r.choice(HOWTO), n=r.choice(NAMES)), ""


def dialogue(r: random.Random) -> tuple[str, str]:
    a, b = r.sample(NAMES, 2)
    about = r.choice([r.choice(TOPICS), f"{article(r.choice(MOODS))} {r.choice(ANIMALS)}", f"a lost {r.choice(OBJECTS)}",
                      f"how to {r.choice(HOWTO)}", f"a trip to {r.choice(TOWNS)}", f"plans for {r.choice(DAYS)}",
                      f"what to cook with {r.choice(FOODS)} and {r.choice(FOODS)}"])  # fmt: skip
    who = r.choice([f"{a} and {b}", f"{a}, {article(r.choice(JOBS))}, and {b}", f"{a} and the {r.choice(JOBS)} {b}"])
    return f"Write a short dialogue between {who} about {about}.", f"{a}: " if r.random() < 0.7 else ""


def letter(r: random.Random) -> tuple[str, str]:
    a, b = r.sample(NAMES, 2)
    reason = r.choice([f"describe a visit to {r.choice(TOWNS)}", f"say thank you for the {r.choice(OBJECTS)}",
                       f"say sorry about the {r.choice(OBJECTS)}", f"invite a friend on {r.choice(DAYS)}",
                       f"ask about {r.choice(TOPICS)}", f"tell that a friend {theme(r)}",
                       f"share news about {article(r.choice(ANIMALS))}"])  # fmt: skip
    if r.random() < 0.35:
        day = f"{r.choice(DAYS)}, {r.choice(MONTHS)} {r.randint(1, 28)}"
        return (f"Write a diary entry of {article(r.choice(MOODS))} {r.choice(JOBS)} on {article(r.choice(WEATHER))} day "
                f"in {r.choice(PLACES + TOWNS)}.", r.choice(["", "Dear diary, ", f"{day}. "]))  # fmt: skip
    kind = r.choice(["letter", "short letter", "email", "postcard", "short message"])
    return f"Write a {kind} from {a} to {b} to {reason}.", f"Dear {b},\n" if r.random() < 0.7 else ""


def question(r: random.Random) -> tuple[str, str]:
    how = r.choice([
        f"What does {article(r.choice(JOBS))} do all day?", f"Where do you find {article(r.choice(ANIMALS))}, and what does it eat?",
        f"What can you do with {article(r.choice(OBJECTS))}?", f"What is {article(r.choice(OBJECTS))} made of?",
        f"Why might someone feel {r.choice(MOODS)}?", f"What should I take to the {r.choice(PLACES)} on {article(r.choice(WEATHER))} day?",
        f"What can I cook with {r.choice(FOODS)} and {r.choice(FOODS)}?", f"What is a good gift for {article(r.choice(JOBS))}?",
        f"Is {article(r.choice(ANIMALS))} a good pet?", f"What do people do in {r.choice(MONTHS)}?",
        f"Give me three sentences with the word '{r.choice(OBJECTS + MOODS + FOODS)}'.", f"Which is better for a child, {article(r.choice(ANIMALS))} or {article(r.choice(ANIMALS))}?",
        f"What is the difference between {article(r.choice(JOBS))} and {article(r.choice(JOBS))}?",
        f"Give me some ideas for a day at the {r.choice(PLACES)}.", f"Why do people like {r.choice(TOPICS)}?",
        f"What is the best time of year for {r.choice(TOPICS)}?", f"Name a few things that are {r.choice(COLOURS)}.",
        f"My friend {r.choice(NAMES)} is {r.choice(MOODS)}. What can I do?", f"Write a short poem about {article(r.choice(ANIMALS))} and {article(r.choice(OBJECTS))}.",
    ])  # fmt: skip
    return how, ""


KINDS = [(story, 46), (description, 10), (explanation, 14), (howto, 6), (dialogue, 9), (letter, 8), (question, 7)]


def make_prompt(seed: int, index: int) -> tuple[str, str]:
    """Prompt number `index`: (user text, opening text that the answer is forced to begin with, maybe empty)."""
    r = random.Random(f"prompt-{seed}-{index}")
    kind = r.choices([k for k, _ in KINDS], [weight for _, weight in KINDS])[0]
    prompt, opening = kind(r)
    return prompt, opening.rstrip(" ")  # the sampler's tokens carry their leading space
