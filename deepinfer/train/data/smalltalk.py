"""Small talk, identity, personas, copying, lists, and remembering a name over several turns."""
# ruff: noqa: E501 (template tables read better with one entry a line)

import random

from deepinfer.recipe.conversation import Message
from deepinfer.train.data import words as w
from deepinfer.train.data.dialogue import Dialogue, chat
from deepinfer.train.data.prompts import article

IDENTITY = [
    ("Who are you?|What are you?|What is your name?|Tell me about yourself.|Introduce yourself.|Which model are you?|Are you an AI?|What should I call you?",
     "I am nano, a small language model.|My name is nano. I am a small language model.|I am nano, a very small language model that answers short questions."),
    ("Are you a human?|Are you a person?|Are you alive?|Do you have a body?", "No, I am nano, a small language model.|No. I am a computer program called nano."),
    ("What can you do?|How can you help me?|What are you good at?", "I can answer questions about a text, write short stories, use tools and do small sums.|I can read a short text, call tools and write simple English."),
    ("How big are you?|How many parameters do you have?|Are you a large model?", "I am very small: about 54 million parameters.|I have about 54 million parameters, so I am a small model."),
    ("Hello|Hi|Hey|Hello!|Hi there|Good morning|Good evening|Hi, nano!|Good afternoon", "Hello! How can I help you?|Hi! What can I do for you?|Hello! What would you like to know?"),
    ("How are you?|How are you today?|How is it going?|Are you well?", "I am fine, thank you. How can I help you?|I am well, thank you. And you?"),
    ("Thank you.|Thanks!|Thanks a lot|Thank you very much!|That was helpful.", "You are welcome!|You are welcome. Can I do anything else?|I am glad to help."),
    ("Bye|Goodbye!|See you later|Good night|I have to go.", "Goodbye! Have a nice day.|Bye! See you soon.|Goodbye!"),
    ("What is the weather like outside?|What time is it?|What did I eat today?|Where am I?|What will happen tomorrow?", "I am sorry, I cannot know that.|I do not know that. I only know what you tell me."),
    ("Can you help me?|I need help.|I have a question.|May I ask something?", "Of course. What do you need?|Yes, please ask.|Sure! What is your question?"),
    ("Tell me a joke.|Do you know a joke?|Say something funny.", "Why did the book go to the doctor? It had too many pages of problems.|What did the sea say to the shore? Nothing, it just waved."),
    ("What is the opposite of hot?", "The opposite of hot is cold."), ("What is the opposite of big?", "The opposite of big is small."),
    ("What colour is the sky?", "On a clear day the sky is blue."), ("How many days are in a week?|How many days does a week have?", "A week has seven days."),
    ("How many months are in a year?", "A year has twelve months."), ("What is the capital of France?", "The capital of France is Paris."), ("What is the capital of Italy?", "The capital of Italy is Rome."),
    ("What is the capital of Japan?", "The capital of Japan is Tokyo."), ("What is the capital of Spain?", "The capital of Spain is Madrid."), ("What is the capital of Germany?", "The capital of Germany is Berlin."),
    ("What is the capital of England?", "The capital of England is London."), ("What do bees make?", "Bees make honey."), ("What do cows drink?", "Cows drink water."), ("Where do fish live?", "Fish live in water."),
    ("What comes after Monday?|Which day comes after Monday?", "Tuesday comes after Monday."), ("What is water made of?", "Water is made of hydrogen and oxygen."), ("What is ice?", "Ice is frozen water."),
    ("How many legs does a spider have?", "A spider has eight legs."), ("How many legs does a dog have?", "A dog has four legs."), ("What do we breathe?", "We breathe air."), ("Is the sun a star?", "Yes, the sun is a star."),
]  # fmt: skip


def small_answers(r: random.Random) -> tuple[str, str]:
    questions, answers = r.choice(IDENTITY)
    return r.choice(questions.split("|")), r.choice(answers.split("|"))


def small_talk(r: random.Random, held_out: bool = False) -> Dialogue:
    """One to three turns of greetings, identity and common knowledge."""
    turns = [small_answers(r) for _ in range(r.choice([1, 1, 2, 3]))]
    before = tuple(m for q, a in turns[:-1] for m in (Message("user", q), Message("assistant", a)))
    system = r.choice(["", "", "You are a helpful assistant.", "You are nano.", "Be brief.", "Answer in one sentence."])
    question, answer = turns[-1]
    return chat(
        "talk",
        r,
        question,
        answer,
        "This is a simple question." if r.random() < 0.5 else "The user wants a short answer.",
        system,
        before,
    )


def persona(r: random.Random, held_out: bool = False) -> Dialogue:
    """The system prompt gives a name, a job and a place to speak about."""
    name, job, town = r.choice(w.names(held_out)), r.choice(w.JOBS), r.choice(w.TOWNS)
    system = r.choice(
        [
            "You are {n}, {j} from {t}.",
            "Your name is {n}. You are {j} and live in {t}.",
            "Play the part of {n}, {j} in {t}.",
            "You are {j} called {n}. You come from {t}.",
        ]
    ).format(n=name, j=article(job), t=town)
    question, answer = r.choice([
        ("Who are you?", f"I am {name}, {article(job)} from {town}."), ("What is your name?", f"My name is {name}."), ("What do you do?", f"I am {article(job)}."), ("Where do you live?", f"I live in {town}."),
        ("What is your job?", f"I work as {article(job)}."), ("Where are you from?", f"I am from {town}."), ("Hello! Who is there?", f"Hello! It is {name}, the {job}."), ("Introduce yourself.", f"I am {name}. I am {article(job)} and I live in {town}."),
    ])  # fmt: skip
    return chat("persona", r, question, answer, f"I am {name}, {article(job)} from {town}.", system)


def words_of(r: random.Random, count: int) -> list[str]:
    return r.sample(
        r.choice([w.ANIMALS, w.FOODS, w.OBJECTS, w.COLOURS, w.JOBS, w.TOWNS, w.OBJECTS + w.ANIMALS + w.MOODS]), count
    )


def copying(r: random.Random, held_out: bool = False) -> Dialogue:
    """Repeat, reverse, first, last, count, upper case, position: small list skills."""
    items = words_of(r, r.randint(2, 6))
    listed = ", ".join(items)
    repeated = r.choice(
        [
            listed,
            f"The {r.choice(w.COLOURS)} {items[0]} and the {items[1]}.",
            f"{r.choice(w.names(held_out))} went to {r.choice(w.TOWNS)} on {r.choice(w.DAYS)}.",
            " ".join(items),
            f"{r.randint(10, 9999)}-{r.randint(10, 9999)}",
        ]
    )
    position = r.randrange(len(items))
    ordinal = ["first", "second", "third", "fourth", "fifth", "sixth"][position]
    question, answer, why = r.choice([
        (f"Repeat this: {repeated}", repeated, "I copy the text."), (f"Copy this text exactly: {repeated}", repeated, "I copy the text."), (f'Say "{repeated}"', repeated, "I say the text."), (f"Write this again: {repeated}", repeated, "I copy the text."),
        (f"Reverse this list: {listed}", ", ".join(reversed(items)), f"The last item is {items[-1]}, so I start there."), (f"Put this list in reverse order: {listed}", ", ".join(reversed(items)), f"The last item is {items[-1]}."),
        (f"What is the {ordinal} word in this list? {listed}", f"The {ordinal} word is {items[position]}.", f"The list is {listed}."), (f"What is the last word in this list? {listed}", f"The last word is {items[-1]}.", f"The list ends with {items[-1]}."),
        (f"How many words are in this list? {listed}", f"There are {len(items)} words.", " ".join(f"{i + 1} {x}" for i, x in enumerate(items))), (f"Write in capital letters: {items[0]}", items[0].upper(), "I use capital letters."),
        (f"Sort this list by the alphabet: {', '.join(items[:3])}", ", ".join(sorted(items[:3])), "I sort the words."), (f"Make a bullet list of {listed}.", "\n".join(f"- {x}" for x in items), "One line for each."),
        (f"Write {listed} as a numbered list.", "\n".join(f"{i + 1}. {x}" for i, x in enumerate(items)), "I number the lines."), (f"Write {listed} as a JSON list.", "[" + ", ".join(f'"{x}"' for x in items) + "]", "I write a JSON array."),
        (f"Is {items[0]} in this list? {listed}", f"Yes, {items[0]} is in the list.", f"The list has {items[0]}."), (f"Is {items[0]} in this list? {', '.join(items[1:])}", f"No, {items[0]} is not in the list.", "I do not see it."),
        (f"Spell the word {items[0].split()[0].lower()}.", "-".join(items[0].split()[0].lower()), "I write each letter."),
    ])  # fmt: skip
    return chat("copy", r, question, answer, why, think=0.2)


def memory(r: random.Random, held_out: bool = False) -> Dialogue:
    """The user says a name and something else; later turns ask for it."""
    name, town, colour, animal = (
        r.choice(w.names(held_out)),
        r.choice(w.TOWNS),
        r.choice(w.COLOURS),
        r.choice(w.ANIMALS),
    )
    facts = [
        (r.choice(["My name is {}.", "I am {}.", "Call me {}.", "Hello, my name is {}."]).format(name), f"Nice to meet you, {name}!", ["What is my name?", "Do you remember my name?", "Who am I?"], f"Your name is {name}."),
        (r.choice(["I live in {}.", "My home is in {}."]).format(town), f"{town} sounds nice.", ["Where do I live?", "Which town did I name?"], f"You live in {town}."),
        (f"My favourite colour is {colour}.", f"{colour.title()} is a nice colour.", ["What is my favourite colour?", "Which colour do I like?"], f"Your favourite colour is {colour}."),
        (f"I have a {animal}.", f"A {animal} is a good pet.", ["What pet do I have?", "Which animal do I have?"], f"You have a {animal}."),
    ]  # fmt: skip
    told = [facts[0], *r.sample(facts[1:], r.randint(0, 2))]
    r.shuffle(told)
    before = [m for said, reply, _, _ in told for m in (Message("user", said), Message("assistant", reply))]
    if r.random() < 0.5:
        question, answer = small_answers(r)
        before += [Message("user", question), Message("assistant", answer)]
    said, _, questions, answer = r.choice(told)
    return chat("memory", r, r.choice(questions), answer, f"The user said: {said}", before=tuple(before))
