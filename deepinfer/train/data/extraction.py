"""JSON extraction: a short text, some named keys, and the JSON object with exactly those keys."""
# ruff: noqa: E501 (template tables read better with one entry a line)

import json
import random
from collections.abc import Callable

from deepinfer.train.data import words as w
from deepinfer.train.data.dialogue import Dialogue, chat

Record = dict[str, str | int | float | bool | None]


def contact(r: random.Random, n: list[str]) -> tuple[Record, str]:
    first, last = r.choice(n), r.choice(w.SURNAMES)
    d: Record = {"name": f"{first} {last}", "email": f"{first.lower()}.{last.lower()}@{r.choice(['mail', 'post', 'example', 'work'])}.{r.choice(['com', 'org', 'net'])}",
                 "phone": f"{r.randint(200, 999)}-{r.randint(1000, 9999)}", "city": r.choice(w.TOWNS), "job": r.choice(w.JOBS), "age": r.randint(18, 80)}  # fmt: skip
    return d, r.choice([
        "{name} is a {age}-year-old {job} from {city}. You can write to {email} or call {phone}.",
        "Please contact {name} ({job}, {age}) in {city}: phone {phone}, email {email}.",
        "My name is {name}. I am {age} years old and I work as a {job} in {city}. My number is {phone} and my email is {email}.",
    ])  # fmt: skip


def order(r: random.Random, n: list[str]) -> tuple[Record, str]:
    d: Record = {"customer": r.choice(n), "item": r.choice(w.OBJECTS), "color": r.choice(w.COLOURS), "quantity": r.randint(1, 20),
                 "price": r.choice([r.randint(2, 200), round(r.uniform(1, 90), 1)]), "day": r.choice(w.DAYS), "paid": r.random() < 0.5}  # fmt: skip
    return d, r.choice([
        "{customer} ordered {quantity} of the {color} {item} at {price} dollars each, for delivery on {day}. The order is {paid_text}.",
        "Order for {day}: {quantity} x {color} {item}, {price} dollars each, for {customer}. It is {paid_text}.",
        "On {day}, {customer} wants {quantity} pieces of our {color} {item}. The price is {price} dollars, {paid_text}.",
    ])  # fmt: skip


def event(r: random.Random, n: list[str]) -> tuple[Record, str]:
    d: Record = {"title": r.choice(["concert", "meeting", "party", "lesson", "lecture", "dinner", "race", "exam", "wedding", "market", "show", "workshop"]),
                 "place": r.choice(w.PLACES), "city": r.choice(w.TOWNS), "day": r.choice(w.DAYS), "hour": r.randint(7, 22), "host": r.choice(n), "guests": r.randint(3, 300)}  # fmt: skip
    return d, r.choice([
        "The {title} is on {day} at {hour} o'clock in the {place} in {city}. {host} is the host, and {guests} guests will come.",
        "{host} invites {guests} guests to a {title} in {city}. It starts at {hour} o'clock on {day}, in the {place}.",
        "On {day}, the {place} in {city} holds a {title} for {guests} guests. Ask {host} for details. It begins at {hour} o'clock.",
    ])  # fmt: skip


def animal(r: random.Random, n: list[str]) -> tuple[Record, str]:
    d: Record = {"species": r.choice(w.ANIMALS), "name": r.choice(["Rex", "Coco", "Pip", "Biscuit", "Luna", "Snow", "Pepper", "Star"]), "age": r.randint(1, 15),
                 "weight": round(r.uniform(0.5, 90), 1), "color": r.choice(w.COLOURS), "owner": r.choice(n), "healthy": r.random() < 0.6}  # fmt: skip
    return d, r.choice([
        "{owner} came with a {color} {species} called {name}. It is {age} years old, weighs {weight} kg and is {healthy_text}.",
        "Patient {name}: {species}, {color}, {age} years old, {weight} kg, {healthy_text}. The owner is {owner}.",
    ])  # fmt: skip


def book(r: random.Random, n: list[str]) -> tuple[Record, str]:
    d: Record = {"title": f"The {r.choice(w.COLOURS).title()} {r.choice(w.OBJECTS).title()}", "author": f"{r.choice(n)} {r.choice(w.SURNAMES)}",
                 "year": r.randint(1900, 2025), "pages": r.randint(40, 900), "city": r.choice(w.TOWNS)}  # fmt: skip
    return d, r.choice([
        "{title} is a book of {pages} pages by {author}. It came out in {city} in {year}.",
        "In {year}, {author} wrote {title}, a book of {pages} pages, while living in {city}.",
    ])  # fmt: skip


def journey(r: random.Random, n: list[str]) -> tuple[Record, str]:
    start, end = r.sample(w.TOWNS, 2)
    d: Record = {"passenger": r.choice(n), "from": start, "to": end, "date": f"{r.randint(2024, 2027)}-{r.randint(1, 12):02d}-{r.randint(1, 28):02d}",
                 "seat": f"{r.randint(1, 60)}{r.choice('ABCD')}", "vehicle": r.choice(["train", "bus", "plane", "ship"]), "price": r.randint(9, 400)}  # fmt: skip
    return d, r.choice([
        "{passenger} takes the {vehicle} from {from} to {to} on {date}, seat {seat}, for {price} euros.",
        "Ticket: {vehicle}, {date}, {from} to {to}. Passenger {passenger}, seat {seat}, {price} euros.",
    ])  # fmt: skip


RECORDS: list[Callable[[random.Random, list[str]], tuple[Record, str]]] = [contact, order, event, animal, book, journey]

ASKS = [
    "Extract {keys} as JSON.\n\n{text}", "{text}\n\nGive me a JSON object with the keys {keys}.", "Return JSON with {keys} for this text:\n{text}",
    "Text: {text}\n\nWrite a JSON object with these keys: {keys}.", "Read the text and fill in {keys}. Answer with JSON only.\n\n{text}",
    "{text}\n\nTurn this into JSON with the fields {keys}.",
]  # fmt: skip


def json_extraction(r: random.Random, held_out: bool = False) -> Dialogue:
    """2 to 5 keys of one record, in any order; a key that the text does not give is null."""
    record, template = r.choice(RECORDS)(r, w.names(held_out))
    shown = record | {
        "paid_text": "paid" if record.get("paid") else "not paid yet",
        "healthy_text": "healthy" if record.get("healthy") else "ill",
    }
    text = template.format(**shown)
    keys = r.sample(list(record), min(len(record), r.randint(2, 5)))
    if r.random() < 0.08:
        missing = r.choice(
            [k for k in ("country", "address", "nickname", "height", "discount", "language") if k not in record]
        )
        keys.insert(r.randrange(len(keys) + 1), missing)
    quoted = [r.choice(['"{}"', '"{}"', "{}"]).format(k) for k in keys]
    listed = ", ".join(quoted[:-1]) + " and " + quoted[-1] if r.random() < 0.7 else ", ".join(quoted)
    user = r.choice(ASKS).format(keys=listed, text=text)
    answer = json.dumps({k: record.get(k) for k in keys})
    system = r.choice(["", "", "", "You answer in JSON.", "You turn text into JSON objects."])
    reasoning = "I copy " + ", ".join(keys) + " from the text."
    return chat("json", r, user, answer, reasoning, system, think=0.2, json_object=r.random() < 0.3)
