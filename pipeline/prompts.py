# ruff: noqa: E501, SIM905
"""The prompts of the default corpus: a seeded generator over templates written for this project.

    for prompt in generate_prompts(count=600, heldout=64, seed=0): ...

Prompt number i of a split is a function of (seed, split, i) and of the prompts before it, never of how many are asked
for: a larger corpus starts with the smaller one, so that its responses are already there.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

Slots = Callable[[random.Random], dict[str, object]]

# fmt: off
NAMES = "Ada Ben Carla Dmitri Elif Farid Grace Hugo Ines Jonas Kira Liam Mona Nadia Omar Paula Quinn Rosa Sami Tara".split()
FRUITS = "apples pears plums oranges peaches lemons figs mangoes apricots cherries".split()
GOODS = "notebooks pencils postcards candles marbles stickers tickets buttons seeds balloons".split()
ANIMALS = "fox owl turtle heron badger hedgehog otter crow squirrel goat whale bee".split()
PLACES = "a lighthouse;a night train;an old library;a mountain hut;a harbour;a bakery;a desert station;a greenhouse;a toy shop;a small island".split(";")
THINGS = "a lost key;a broken clock;a letter without a sender;a red umbrella;a map;a jar of honey;a silver coin;a wooden boat;a paper star;an empty cage".split(";")
TOPICS = "rain;the tides;photosynthesis;magnets;volcanoes;the seasons;sound;rust;yeast;rainbows;earthquakes;the moon;electric current;echoes;snow;vaccines".split(";")
CONCEPTS = "inflation;recursion;gravity;evolution;a budget;democracy;an algorithm;energy;probability;a supply chain;a metaphor;compound interest;a database;a hypothesis".split(";")
PAIRS = "a lake and a river;a comet and an asteroid;weather and climate;a list and a set;mass and weight;speed and velocity;a virus and a bacterium;a theory and a guess;butter and margarine;a crocodile and an alligator".split(";")
PROFESSIONS = "teacher;nurse;carpenter;pilot;baker;gardener;librarian;plumber;farmer;journalist".split(";")
ACTIVITIES = "learning a language;running a first race;moving to another city;planting a garden;keeping a diary;painting a room;planning a picnic;cleaning a bicycle;packing for a trip;starting a book club".split(";")
MEALS = "lentil soup;pancakes;a vegetable curry;potato salad;an omelette;tomato pasta;rice pudding;flat bread;a fruit crumble;bean stew".split(";")
MOODS = "cheerful;sad;mysterious;calm;funny;hopeful".split(";")
LANGUAGES = ["Python"] * 4 + ["JavaScript"]
LIST_TASKS = [
    "returns the largest even number of a list of integers",
    "removes the duplicates of a list and keeps the order",
    "rotates a list to the right by k places",
    "counts how often each word occurs in a text",
    "merges two sorted lists into one sorted list",
    "returns the second smallest number of a list",
    "splits a list into chunks of n elements",
    "computes the running average of a list of numbers",
    "groups words by their first letter",
    "flattens a list of lists",
    "finds all pairs of numbers in a list that add up to a given sum",
    "returns the longest word of a sentence",
]
NUMBER_TASKS = [
    "tells whether a number is prime",
    "computes the greatest common divisor of two numbers",
    "returns the digits of a number in reverse",
    "converts a temperature from Celsius to Fahrenheit",
    "computes the nth Fibonacci number without recursion",
    "converts a number to its binary digits as a string",
    "computes the factorial of n",
    "counts the divisors of a number",
    "tells whether a year is a leap year",
    "adds up all multiples of three below n",
]
STRING_TASKS = [
    "tells whether a string is a palindrome",
    "counts the vowels of a string",
    "turns snake_case into camelCase",
    "removes all punctuation from a string",
    "tells whether two words are anagrams",
    "compresses runs of equal letters, so that 'aaab' becomes 'a3b1'",
    "replaces every second letter of a string by a dash",
    "returns the initials of a full name",
]
CLASSES = "a bank account;a shopping cart;a stack;a queue;a bookshelf;a timer;a playlist;a parking lot".split(";")
# fmt: on
SENTENCES = [
    "The meeting was moved to Thursday because the room was not free.",
    "We was going to the store when the rain starts.",
    "Due to the fact that the bridge is closed, people has to take the longer road.",
    "He opened the box, and he looked in the box, and the box was empty.",
    "The results of the test, which were good, were sent to all of the students by the teacher.",
    "I am writing in order to let you know that your parcel did not arrive yet.",
    "They don't have no time for the visit, but they will tries next week.",
    "It is possible that there may be some delay in the delivery of the new chairs.",
    "The garden, that is behind the house, it needs water every day in the summer.",
    "Please do not hesitate to contact us in case that you have questions of any kind.",
]
PARAGRAPHS = [
    "Bees visit flowers to collect nectar and pollen. While they move from flower to flower they carry pollen along, and so "
    "plants can make seeds. Many farmers depend on them, and some even rent hives in spring.",
    "The town built a new path along the river last year. At first few people used it. Now it is full on every sunny day, and "
    "two small cafés have opened beside it.",
    "Glass is made from sand, soda and lime. The mixture melts at about 1500 degrees. It is then blown, rolled or pressed into "
    "shape and cooled slowly, since fast cooling would make it crack.",
    "When the library changed its opening hours, visitors complained. The staff asked them what they needed. Since then the "
    "library opens late twice a week, and the number of visitors has grown by a third.",
    "Salt was once so valuable that towns grew rich by trading it. Roads were built for it and taxes were laid on it. Today it "
    "is cheap, and most of it is used on icy roads and in factories.",
    "Our team tested three kinds of paint on the boat. The cheapest lasted one summer. The second lasted two, but lost its "
    "colour. The third looked new after three years, though it costs twice as much.",
]  # fmt: skip
OPENINGS = [
    "The last bus had already left when",
    "Nobody had opened the door for a hundred years, until",
    "It was the quietest morning of the winter, and",
    "The letter began with an apology:",
    "On the day the river ran backwards,",
    "She counted the coins again, and",
]


@dataclass(frozen=True)
class Template:
    """One kind of prompt: `pattern` is filled by what `slots` draws."""

    name: str
    category: str
    pattern: str
    slots: Slots
    heldout: bool = False


@dataclass(frozen=True)
class Prompt:
    """A prompt with where it comes from; `split` is "train" or "heldout"."""

    text: str
    template: str
    category: str
    split: str


def _pick(**choices: list) -> Slots:
    return lambda r: {k: r.choice(v) for k, v in choices.items()}


def _two_names(r: random.Random) -> dict[str, object]:
    a, b = r.sample(NAMES, 2)
    return {"a": a, "b": b}


def _numbers(**ranges: tuple[int, int]) -> Slots:
    def draw(r: random.Random) -> dict[str, object]:
        a, b = r.sample(NAMES, 2)
        fixed = {"a": a, "b": b, "fruit": r.choice(FRUITS), "goods": r.choice(GOODS), "place": r.choice(PLACES)}
        return fixed | {k: r.randint(*v) for k, v in ranges.items()}

    return draw


def _sequence(r: random.Random) -> dict[str, object]:
    start, step, kind = r.randint(1, 20), r.randint(2, 9), r.choice(["add", "double", "square"])
    terms = {
        "add": [start + i * step for i in range(5)],
        "double": [start * 2**i for i in range(5)],
        "square": [(i + step) ** 2 for i in range(5)],
    }[kind]
    return {"terms": ", ".join(map(str, terms))}


def _list_of_numbers(r: random.Random) -> dict[str, object]:
    return {"numbers": ", ".join(str(r.randint(1, 60)) for _ in range(r.randint(5, 8)))}


def _bug(r: random.Random) -> dict[str, object]:
    op, limit = r.choice(["sum", "product"]), r.randint(3, 9)
    sign, start = ("+", 0) if op == "sum" else ("*", 0)
    return {"op": op, "sign": sign, "start": start if op == "product" else r.randint(1, 3), "limit": limit}


TEMPLATES: tuple[Template, ...] = (
    # word problems
    Template("buy-total", "word-problem", "{a} buys {n} {goods} for ${p} each and pays with a ${bill} bill. How much change does {a} get? Show the steps.", _numbers(n=(2, 8), p=(2, 6), bill=(50, 100))),
    Template("share", "word-problem", "{a} has {n} {fruit} and shares them equally among {k} friends. How many does each friend get, and how many are left over?", _numbers(n=(20, 90), k=(3, 9))),
    Template("two-trains", "word-problem", "A train leaves the station at {h} o'clock and drives {v} kilometres per hour. How far has it come at {e} o'clock?", _numbers(h=(6, 11), v=(60, 140), e=(13, 20))),
    Template("ages", "word-problem", "{a} is {n} years older than {b}. Together they are {total} years old. How old is each of them?", lambda r: _two_names(r) | (lambda y, d: {"n": d, "total": 2 * y + d})(r.randint(5, 30), r.randint(2, 12))),
    Template("baskets", "word-problem", "{a} picks {x} {fruit} on Monday, twice as many on Tuesday and {y} fewer than on Tuesday on Wednesday. How many {fruit} are that in total?", _numbers(x=(10, 40), y=(3, 9))),
    Template("discount", "word-problem", "A jacket costs ${p}. In a sale its price is reduced by {d} percent. What does it cost now?", lambda r: {"p": r.randint(4, 30) * 10, "d": r.choice([10, 15, 20, 25, 30, 40])}),
    Template("work-rate", "word-problem", "{a} can pack {x} boxes in an hour and {b} can pack {y}. How long do they need together for {n} boxes?", lambda r: _two_names(r) | (lambda x, y, h: {"x": x, "y": y, "n": (x + y) * h})(r.randint(4, 12), r.randint(4, 12), r.randint(2, 6))),
    Template("fence", "word-problem", "A rectangular garden is {x} metres long and {y} metres wide. How long is a fence around it, and what is its area?", _numbers(x=(8, 40), y=(5, 30))),
    Template("savings", "word-problem", "{a} saves ${x} every week and already has ${s}. After how many weeks does {a} have at least ${goal}?", _numbers(x=(5, 25), s=(10, 60), goal=(150, 400))),
    Template("mixture", "word-problem", "A recipe for {k} people needs {g} grams of flour. How much flour does {a} need for {m} people?", _numbers(k=(2, 5), g=(150, 500), m=(6, 14))),
    # small programming tasks
    Template("function-list", "programming", "Write a {lang} function that {task}. Add a short example.", _pick(lang=LANGUAGES, task=LIST_TASKS)),
    Template("function-number", "programming", "Write a {lang} function that {task}.", _pick(lang=LANGUAGES, task=NUMBER_TASKS)),
    Template("function-string", "programming", "In {lang}, write a function that {task}, and explain it in two sentences.", _pick(lang=LANGUAGES, task=STRING_TASKS)),
    Template("class", "programming", "Write a small Python class for {thing} with three methods and show how to use it.", _pick(thing=CLASSES)),
    Template("find-bug", "programming", "This Python function should return the {op} of the numbers from 1 to n, but it is wrong:\n\ndef f(n):\n    total = {start}\n    for i in range(n):\n        total = total {sign} i\n    return total\n\nFind the mistakes and write the corrected function. What should f({limit}) return?", _bug),
    Template("tests-for", "programming", "Write three test cases with assert for a Python function that {task}.", _pick(task=LIST_TASKS + NUMBER_TASKS)),
    Template("pseudocode", "programming", "Describe in numbered steps, without code, how a program {task}.", _pick(task=LIST_TASKS + STRING_TASKS)),
    Template("command-line", "programming", "Write a Python script that reads a text file, {task}, and prints the result.", lambda r: {"task": r.choice(["counts its lines", "finds its longest line", "replaces tabs by four spaces", "sorts its lines", "counts its words", "removes its empty lines", "prints every line that has a number"])}),
    Template("loop-output", "programming", "What does this Python code print, and why?\n\nx = {x}\nfor i in range({n}):\n    x = x + i * {k}\nprint(x)", _numbers(x=(1, 20), n=(3, 6), k=(2, 5))),
    # questions
    Template("why", "question", "Explain in simple words how {topic} works or comes about.", _pick(topic=TOPICS)),
    Template("define", "question", "What is {concept}? Give a definition and one example from daily life.", _pick(concept=CONCEPTS)),
    Template("difference", "question", "What is the difference between {pair}?", _pick(pair=PAIRS)),
    Template("how-to", "question", "How do I make {meal}? List what I need and then the steps.", _pick(meal=MEALS)),
    Template("profession", "question", "What does a {job} do on a normal working day?", _pick(job=PROFESSIONS)),
    Template("pros-cons", "question", "What speaks for and what speaks against {activity}?", _pick(activity=ACTIVITIES)),
    Template("child", "question", "A six-year-old asks you about {topic}. What do you answer?", _pick(topic=TOPICS)),
    Template("history", "question", "Why was the invention of {thing} important?", lambda r: {"thing": r.choice(["the wheel", "printing", "the compass", "the telephone", "the steam engine", "paper", "the bicycle", "the microscope", "glass", "the light bulb"])}),
    Template("advice", "question", "{a} is nervous about {activity}. Give {a} some friendly advice.", _pick(a=NAMES, activity=ACTIVITIES)),
    Template("sequence", "question", "Continue this sequence with three more numbers and explain the rule: {terms}", _sequence),
    # rewriting
    Template("correct", "rewriting", "Correct the grammar of this sentence: \"{s}\"", _pick(s=SENTENCES)),
    Template("shorter", "rewriting", "Make this sentence shorter without losing its meaning: \"{s}\"", _pick(s=SENTENCES)),
    Template("tone", "rewriting", "Rewrite this sentence so that it sounds {tone}: \"{s}\"", lambda r: {"tone": r.choice(["friendly", "formal", "urgent", "poetic", "like a child speaking"]), "s": r.choice(SENTENCES)}),
    Template("summary", "rewriting", "Summarise this text in one sentence:\n\n{p}", _pick(p=PARAGRAPHS)),
    Template("title", "rewriting", "Suggest {n} titles for this text:\n\n{p}", lambda r: {"n": r.randint(3, 5), "p": r.choice(PARAGRAPHS)}),
    Template("bullets", "rewriting", "Turn this text into a list of bullet points:\n\n{p}", _pick(p=PARAGRAPHS)),
    Template("questions-on", "rewriting", "Write {n} questions that this text answers:\n\n{p}", lambda r: {"n": r.randint(2, 4), "p": r.choice(PARAGRAPHS)}),
    # lists
    Template("list-ideas", "list", "List {n} ideas for {activity}.", lambda r: {"n": r.randint(4, 8), "activity": r.choice(ACTIVITIES)}),
    Template("list-facts", "list", "Give {n} interesting facts about the {animal}.", lambda r: {"n": r.randint(3, 6), "animal": r.choice(ANIMALS)}),
    Template("list-pack", "list", "Write a packing list for a week in {place}.", _pick(place=PLACES)),
    Template("sort-list", "list", "Sort these numbers from the smallest to the largest and give their sum: {numbers}", _list_of_numbers),
    Template("list-words", "list", "Write down {n} words that describe {place}, each with a short explanation.", lambda r: {"n": r.randint(4, 7), "place": r.choice(PLACES)}),
    Template("plan", "list", "Make a plan for {days} days of {activity}, one line per day.", lambda r: {"days": r.randint(3, 7), "activity": r.choice(ACTIVITIES)}),
    # short stories
    Template("story", "story", "Write a short {mood} story about a {animal} who finds {thing}.", _pick(mood=MOODS, animal=ANIMALS, thing=THINGS)),
    Template("story-place", "story", "Write a short story that takes place in {place}. The main character is called {a}.", _pick(place=PLACES, a=NAMES)),
    Template("continue", "story", "Continue this story with a few sentences: \"{opening} {a} ...\"", _pick(opening=OPENINGS, a=NAMES)),
    Template("dialogue", "story", "Write a dialogue between {a} and {b} about {thing}.", lambda r: _two_names(r) | {"thing": r.choice(THINGS)}),
    Template("fable", "story", "Tell a fable with a {animal} and a {other}, and end with its lesson.", lambda r: dict(zip(("animal", "other"), r.sample(ANIMALS, 2), strict=True))),
    # held out entirely: no training prompt has their form
    Template("coins", "word-problem", "{a} has {x} coins of 20 cents and {y} coins of 50 cents. How many dollars are that?", _numbers(x=(3, 20), y=(3, 20)), heldout=True),
    Template("reading", "word-problem", "A book has {n} pages. {a} reads {k} pages a day. On which day does {a} finish it?", _numbers(n=(90, 400), k=(12, 35)), heldout=True),
    Template("dict-function", "programming", "Write a Python function that takes a dictionary of names and {what} and returns the name with the {which} value.", lambda r: {"what": r.choice(["ages", "scores", "prices", "heights"]), "which": r.choice(["largest", "smallest"])}, heldout=True),
    Template("translate-code", "programming", "Rewrite this Python line as a loop that a beginner understands: result = [x * {k} for x in range({n}) if x % {m} == 0]", _numbers(k=(2, 9), n=(10, 50), m=(2, 5)), heldout=True),
    Template("what-if", "question", "What would happen if there were no {thing}?", lambda r: {"thing": r.choice(["moon", "insects", "salt", "wind", "money", "clocks", "roads", "books", "ice", "friction"])}, heldout=True),
    Template("email", "rewriting", "Write a polite e-mail to a {job} in which you ask for {thing}.", lambda r: {"job": r.choice(PROFESSIONS), "thing": r.choice(["an appointment", "a refund", "some advice", "a recommendation", "a copy of the bill"])}, heldout=True),
    Template("letter-story", "story", "Write a postcard that {a} sends to {b} from {place}.", lambda r: _two_names(r) | {"place": r.choice(PLACES)}, heldout=True),
)  # fmt: skip

# Appended to every second prompt; "" keeps the other half bare. They multiply the fillings of the templates that have few.
WISHES: dict[str, list[str]] = {
    "word-problem": ["Write the answer as a full sentence.", "First write down what is known.", "Check your result at the end."],
    "programming": ["Use clear variable names.", "Also say what happens for empty input.", "Comment every line.", "Keep the code short."],
    "question": ["Answer in three sentences.", "Use a comparison from the kitchen.", "Answer in one paragraph.", "Give two examples.", "End with a question back to me."],
    "rewriting": ["Say in one sentence what you changed.", "Give two versions.", "Use simple words."],
    "list": ["Give a reason for each.", "Number them.", "Use at most ten words for each.", "Put the most important first."],
    "story": ["Keep it under 120 words.", "End with a surprise.", "Tell it in the first person.", "Use the present tense.", "Begin with the weather."],
}  # fmt: skip

HELDOUT_TEMPLATE_SHARE = 0.5  # of the held-out prompts; the rest are unseen fillings of training templates


def generate_prompts(count: int, heldout: int, seed: int = 0) -> Iterator[Prompt]:
    """`heldout` held-out prompts, then `count` training prompts; all texts differ.

    Held-out prompts come first so that their set does not depend on `count`, and training skips their texts.

    Raises:
        ValueError: more prompts asked for than the templates can give.
    """
    seen: set[str] = set()
    for split, number in (("heldout", heldout), ("train", count)):
        for i in range(number):
            yield _draw(seed, split, i, seen)


def _draw(seed: int, split: str, i: int, seen: set[str]) -> Prompt:
    for attempt in range(1000):
        r = random.Random(f"{seed}/{split}/{i}/{attempt}")
        held = split == "heldout" and r.random() < HELDOUT_TEMPLATE_SHARE
        template = r.choice([t for t in TEMPLATES if t.heldout == held])
        text = template.pattern.format(**template.slots(r))
        if r.random() < 0.5:
            text += ("\n\n" if "\n" in text else " ") + r.choice(WISHES[template.category])
        if text not in seen:
            seen.add(text)
            return Prompt(text, template.name, template.category, split)
    raise ValueError(f"the templates give no further new prompt after {len(seen)} of them; ask for fewer")
