"""Arithmetic with thinking: small sums, differences, products and word problems, worked out in `<think>`."""
# ruff: noqa: E501 (template tables read better with one entry a line)

import random

from deepinfer.train.data import words as w
from deepinfer.train.data.dialogue import Dialogue, chat


def add_steps(a: int, b: int) -> str:
    """Tens and ones apart, for numbers below 1000."""
    if b < 10 or a < 10:
        return f"{a} + {b} = {a + b}."
    tens = b - b % 10
    if b % 10 == 0:
        return f"{a} + {b} = {a + b}."
    return f"{a} + {tens} = {a + tens}. {a + tens} + {b % 10} = {a + b}."


def subtract_steps(a: int, b: int) -> str:
    tens = b - b % 10
    if tens == 0 or b % 10 == 0:
        return f"{a} - {b} = {a - b}."
    return f"{a} - {tens} = {a - tens}. {a - tens} - {b % 10} = {a - b}."


def multiply_steps(a: int, b: int) -> str:
    if a < 10 or b > 10 or a % 10 == 0:
        return f"{a} x {b} = {a * b}."
    tens, ones = a - a % 10, a % 10
    return f"{tens} x {b} = {tens * b}. {ones} x {b} = {ones * b}. {tens * b} + {ones * b} = {a * b}."


def numbers(r: random.Random, operation: str) -> tuple[int, int]:
    if operation == "x":
        return r.choice(
            [
                (r.randint(0, 12), r.randint(0, 12)),
                (r.randint(2, 12), r.randint(2, 12)),
                (r.randint(11, 40), r.randint(2, 9)),
            ]
        )
    top = r.choice([10, 20, 100, 100])
    a, b = r.randint(0, top), r.randint(0, top)
    return (max(a, b), min(a, b)) if operation == "-" else (a, b)


def solve(a: int, b: int, operation: str) -> tuple[int, str]:
    if operation == "+":
        return a + b, add_steps(a, b)
    if operation == "-":
        return a - b, subtract_steps(a, b)
    return a * b, multiply_steps(a, b)


def in_evaluation(a: int, b: int) -> bool:
    """One pair in twenty is never trained on."""
    return (a * 31 + b * 17) % 20 == 7


WORD_PROBLEMS = {
    "+": ["{n} has {a} {t} and gets {b} more. How many {t} does {n} have now?", "There are {a} {t} on the table and {b} {t} on the floor. How many {t} are there in all?",
          "{n} bought {a} {t} on Monday and {b} on Tuesday. How many {t} is that?"],
    "-": ["{n} has {a} {t} and gives {b} away. How many {t} are left?", "There were {a} {t} in the box. {n} took {b}. How many are still there?",
          "{n} needs {a} {t} and has {b}. How many {t} are missing?"],
    "x": ["{n} has {a} boxes with {b} {t} each. How many {t} does {n} have?", "One bag holds {b} {t}. How many {t} are in {a} bags?",
          "{n} buys {b} {t} every day for {a} days. How many {t} does {n} buy?"],
}  # fmt: skip
ASKS = ["What is {e}?", "{e} = ?", "Calculate {e}.", "How much is {e}?", "Work out {e}.", "Please compute {e}.", "{e}"]
SPELLED = {"+": ["+", "plus"], "-": ["-", "minus"], "x": ["x", "*", "times"]}
THINGS = "apples books coins pencils eggs stones shells cookies marbles buttons candles stamps cups flowers oranges balls".split()


def arithmetic(r: random.Random, held_out: bool = False) -> Dialogue:
    """Mostly with thinking; answers are one short sentence or the number alone."""
    operation = r.choice("++--x")
    a, b = numbers(r, operation)
    while in_evaluation(a, b) != held_out:
        a, b = numbers(r, operation)
    result, steps = solve(a, b, operation)
    if r.random() < 0.4:
        thing = r.choice(THINGS)
        user = r.choice(WORD_PROBLEMS[operation]).format(n=r.choice(w.names(held_out)), a=a, b=b, t=thing)
        answer = f"The answer is {result}."
        steps = f"This is {a} {operation} {b}. " + steps
    else:
        user = r.choice(ASKS).format(e=f"{a} {r.choice(SPELLED[operation])} {b}")
        answer = r.choice([f"{a} {operation} {b} = {result}.", f"The answer is {result}."])
    return chat("arithmetic", r, user, answer, steps, think=0.8, expected=str(result))
