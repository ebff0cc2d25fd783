"""The scenarios that word problems are made from: each tells one story and solves it step by step.

The wording of a solution follows from the question alone, so that a model that reads the question well is never unsure
of the words, only of the arithmetic.
"""

from collections.abc import Callable
from dataclasses import dataclass

from trouterd.demo.story import Story


@dataclass(frozen=True, slots=True)
class Person:
    """A name and the pronouns that go with it."""

    name: str
    she: str
    her: str
    """Object form: "gives her"."""
    hers: str
    """Possessive form: "her birthday"."""

    @property
    def subject(self) -> str:
        return self.she.capitalize()


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_WOMEN = _words("Mia Anna Sara Lena Zoe Nora Emma Ella Ruth Maya Lucy Iris Clara Alice Priya Aisha Rosa Hannah")
_MEN = _words("Tom Ben Leo Max Omar Sam Noah Paul Ivan Luis Adam Finn Hugo Jack Ravi Kenji Oscar David")
_PEOPLE = (
    *(Person(name, "she", "her", "her") for name in _WOMEN),
    *(Person(name, "he", "him", "his") for name in _MEN),
)
_THINGS = _words(
    "apples marbles stickers pencils shells coins stamps buttons cards beads plums balloons stones cookies "
    "crayons tickets peaches walnuts"
)
_CONTAINERS = _words("bag box pack basket jar")
_BAKED = _words("muffins rolls pies buns pretzels")
_FLOWERS = _words("roses tulips daisies lilies sunflowers")
_GOODS = _words("notebook pen book candle cup hat ball blanket brush lamp")
_WISHES = ("a game", "a jacket", "a new lamp", "a present", "a pair of shoes", "a ticket")
_PARTS = _words("screws toys chairs bottles clocks keys")


def _plural(noun: str) -> str:
    return noun + ("es" if noun.endswith(("x", "sh")) else "s")


def _people(story: Story, count: int) -> list[Person]:
    return story.rng.sample(_PEOPLE, count)


def _collection(story: Story) -> None:
    who, friend = _people(story, 2)
    things = story.rng.choice(_THINGS)
    total = story.number(12, 180)
    story.tell(f"{who.name} has {total} {things}.", f"{who.name} starts with {total} {things}.")
    story.note(f"{who.name} starts with {total} {things}.")
    for event in story.rng.sample(["buy", "get", "give", "lose"], story.number(1, 2)):
        if event == "buy":
            count, size = story.number(3, 9), story.number(4, 25)
            box = story.rng.choice(_CONTAINERS)
            story.tell(
                f"{who.subject} buys {count} {_plural(box)} with {size} {things} in each {box}.",
                f"Then {who.she} buys {count} {_plural(box)} of {size} {things} each.",
            )
            bought = story.step(count, "*", size, f"{count} {_plural(box)} of {size} {things} make", things)
            total = story.step(total, "+", bought)
        elif event == "get":
            gift = story.number(11, 150)
            story.tell(
                f"{friend.name} gives {who.her} {gift} more {things}.",
                f"Then {who.she} finds {gift} more {things}.",
                f"{who.subject} gets another {gift} {things} from {friend.name}.",
            )
            total = story.step(total, "+", gift)
        else:
            loss = story.number(5, max(6, min(150, total - 3)))
            story.tell(
                f"Then {who.she} gives {loss} {things} to {friend.name}.",
                f"{who.subject} loses {loss} of the {things}.",
                f"Then {who.she} gives away {loss} {things}.",
            )
            total = story.step(total, "-", loss, "Then")
    _close_collection(story, who, things, total)


def _close_collection(story: Story, who: Person, things: str, total: int) -> None:
    ending = story.rng.choice(["count", "count", "share", "sell"])
    if ending == "count":
        story.tell(f"How many {things} does {who.name} have now?", f"How many {things} does {who.she} have in the end?")
    elif ending == "share":
        friends = story.divisor(total)
        story.tell(
            f"{who.subject} shares all of them equally among {friends} friends. "
            f"How many {things} does each friend get?",
            f"{who.name} puts all the {things} into {friends} equal piles. How many {things} are in each pile?",
        )
        story.step(total, "/", friends)
    else:
        price = story.number(2, 9)
        story.tell(f"{who.subject} sells all of them for {price} dollars each. How many dollars does {who.she} get?")
        story.step(total, "*", price)


def _comparison(story: Story) -> None:
    people = _people(story, story.number(2, 3))
    things = story.rng.choice(_THINGS)
    counts = [story.number(12, 160)]
    story.tell(f"{people[0].name} has {counts[0]} {things}.", f"{people[0].name} owns {counts[0]} {things}.")
    for before, who in zip(people, people[1:], strict=False):
        if story.rng.random() < 0.35:
            amount = story.number(2, 6)
            story.tell(f"{who.name} has {amount} times as many {things} as {before.name}.")
            counts.append(story.step(counts[-1], "*", amount, f"{who.name} has", things))
            continue
        amount, more = story.number(4, 90), story.rng.random() < 0.5
        story.tell(f"{who.name} has {amount} {'more' if more else 'fewer'} {things} than {before.name}.")
        counts.append(story.step(counts[-1], "+" if more else "-", amount, f"{who.name} has", things))
    story.tell(f"How many {things} do they have together?", f"How many {things} do they have in all?")
    total = counts[0]
    for count in counts[1:]:
        total = story.step(total, "+", count)


def _bakery(story: Story) -> None:
    goods = story.rng.choice(_BAKED)
    trays, size = story.number(4, 12), story.number(8, 36)
    story.tell(
        f"A baker bakes {trays} trays with {size} {goods} on each tray.",
        f"In the morning a baker makes {trays} trays of {size} {goods}.",
    )
    left = story.step(trays, "*", size, "The baker makes", goods)
    sold = story.number(15, max(16, left // 2))
    story.tell(f"The baker sells {sold} {goods} before noon.", f"The first customers buy {sold} {goods}.")
    left = story.step(left, "-", sold)
    if story.rng.random() < 0.6:
        sold = story.number(10, max(11, left - 4))
        story.tell(f"In the afternoon {sold} more {goods} are sold.", f"After lunch the baker sells {sold} more.")
        left = story.step(left, "-", sold)
    if story.rng.random() < 0.5:
        story.tell(f"How many {goods} are left?", f"How many {goods} has the baker not sold?")
        return
    size = story.divisor(left)
    story.tell(f"The rest are packed into boxes of {size}. How many boxes are there?")
    story.step(left, "/", size)


def _savings(story: Story) -> None:
    who = _people(story, 1)[0]
    weeks, rate = story.number(3, 12), story.number(6, 45)
    story.tell(
        f"{who.name} saves {rate} dollars every week for {weeks} weeks.",
        f"For {weeks} weeks {who.name} earns {rate} dollars a week by walking dogs.",
    )
    money = story.step(weeks, "*", rate, f"In {weeks} weeks {who.name} gets", "dollars")
    if story.rng.random() < 0.6:
        gift = story.number(12, 95)
        relative = story.rng.choice(["aunt", "uncle", "mother", "father"])
        story.tell(
            f"{who.hers.capitalize()} {relative} gives {who.her} {gift} dollars for {who.hers} birthday.",
            f"{who.hers.capitalize()} {relative} adds {gift} dollars.",
        )
        money = story.step(money, "+", gift)
    cost = story.number(7, max(8, money - 5))
    story.tell(
        f"Then {who.she} spends {cost} dollars on {story.rng.choice(_WISHES)}.",
        f"{who.subject} buys {story.rng.choice(_WISHES)} for {cost} dollars.",
    )
    story.step(money, "-", cost)
    story.tell(f"How many dollars does {who.name} have left?", f"How much money does {who.she} still have, in dollars?")


def _bus(story: Story) -> None:
    vehicle = story.rng.choice(["bus", "train", "ferry", "tram"])
    on_board = story.number(20, 250)
    story.tell(
        f"A {vehicle} leaves with {on_board} passengers.",
        f"There are {on_board} people on a {vehicle}.",
    )
    story.note(f"The {vehicle} starts with {on_board} people.")
    for stop in ["first", "second"][: story.number(1, 2)]:
        off, on = story.number(5, max(6, on_board - 5)), story.number(6, 120)
        story.tell(
            f"At the {stop} stop {off} people get off and {on} people get on.",
            f"At the {stop} stop {off} get off and {on} get on.",
        )
        stayed = story.step(on_board, "-", off, f"After the {stop} stop")
        on_board = story.step(stayed, "+", on)
    story.tell(f"How many people are on the {vehicle} now?", f"How many passengers does the {vehicle} carry now?")


def _reading(story: Story) -> None:
    who = _people(story, 1)[0]
    days, rate = story.number(3, 12), story.number(8, 48)
    pages = story.number(120, 900)
    story.tell(
        f"{who.name} has a book with {pages} pages.",
        f"{who.name} borrows a book of {pages} pages from the library.",
    )
    story.tell(
        f"{who.subject} reads {rate} pages a day for {days} days.",
        f"For {days} days {who.she} reads {rate} pages every day.",
    )
    read = story.step(days, "*", rate, f"In {days} days {who.name} reads", "pages")
    if story.rng.random() < 0.6:
        extra = story.number(11, 95)
        story.tell(f"On Sunday {who.she} reads another {extra} pages.", f"Then {who.she} reads {extra} more pages.")
        read = story.step(read, "+", extra)
    story.step(pages, "-", read)
    story.tell("How many pages are left to read?", f"How many pages does {who.she} still have to read?")


def _school_trip(story: Story) -> None:
    classes, size, teachers = story.number(3, 9), story.number(12, 34), story.number(4, 30)
    place = story.rng.choice(["museum", "zoo", "castle", "theater"])
    story.tell(
        f"{classes} classes of {size} students visit the {place}. {teachers} teachers come with them.",
        f"A school sends {classes} classes with {size} students each and {teachers} teachers to the {place}.",
    )
    students = story.step(classes, "*", size, "There are", "students")
    people = story.step(students, "+", teachers, after="people")
    if story.rng.random() < 0.5:
        ticket = story.number(2, 5)
        story.tell(f"Each ticket costs {ticket} dollars. How many dollars do all the tickets cost?")
        story.step(people, "*", ticket)
    else:
        groups = story.divisor(people)
        story.tell(f"They form {groups} groups of the same size. How many people are in each group?")
        story.step(people, "/", groups)


def _farm(story: Story) -> None:
    hens, eggs, days = story.number(4, 30), story.number(2, 6), story.number(2, 7)
    story.tell(
        f"A farmer has {hens} hens. Each hen lays {eggs} eggs a week. The farmer collects the eggs for {days} weeks.",
        f"A farm has {hens} hens, and each of them lays {eggs} eggs a week. The eggs of {days} weeks are collected.",
    )
    weekly = story.step(hens, "*", eggs, "Each week there are", "eggs")
    left = story.step(weekly, "*", days, f"In {days} weeks there are", "eggs")
    broken = story.number(5, max(6, min(99, left - 6)))
    story.tell(f"{broken} eggs break.", f"The family eats {broken} of the eggs.")
    left = story.step(left, "-", broken)
    if story.rng.random() < 0.5:
        story.tell("How many eggs are left?", "How many eggs can still be sold?")
        return
    size = story.divisor(left)
    story.tell(f"The other eggs go into boxes of {size}. How many boxes are filled?")
    story.step(left, "/", size)


def _journey(story: Story) -> None:
    who = _people(story, 1)[0]
    speed, hours, extra = story.number(14, 95), story.number(2, 8), story.number(15, 120)
    story.tell(
        f"{who.name} drives {speed} kilometers an hour for {hours} hours.",
        f"{who.name} travels for {hours} hours at {speed} kilometers an hour.",
    )
    done = story.step(hours, "*", speed, f"In {hours} hours {who.name} covers", "kilometers")
    if story.rng.random() < 0.6:
        story.tell(
            f"After a rest {who.she} goes another {extra} kilometers.", f"Then {who.she} goes {extra} kilometers more."
        )
        done = story.step(done, "+", extra)
    whole = done + story.number(5, 180)
    story.tell(f"The whole way is {whole} kilometers long. How many kilometers are left?")
    story.step(whole, "-", done)


def _shopping(story: Story) -> None:
    who = _people(story, 1)[0]
    first, second = story.rng.sample(_GOODS, 2)
    count, price, number, cost = story.number(2, 9), story.number(3, 28), story.number(2, 9), story.number(3, 28)
    story.tell(
        f"{who.name} buys {count} {_plural(first)} for {price} dollars each "
        f"and {number} {_plural(second)} for {cost} dollars each.",
        f"A {first} costs {price} dollars and a {second} costs {cost} dollars. "
        f"{who.name} buys {count} {_plural(first)} and {number} {_plural(second)}.",
    )
    left = story.step(count, "*", price, f"The {_plural(first)} cost", "dollars")
    right = story.step(number, "*", cost, f"The {_plural(second)} cost", "dollars")
    total = story.step(left, "+", right)
    if story.rng.random() < 0.4:
        story.tell("How many dollars does everything cost?", f"How much does {who.she} pay in all, in dollars?")
        return
    purse = total + story.number(3, 150)
    story.tell(f"{who.subject} had {purse} dollars. How many dollars are left?")
    story.step(purse, "-", total)


def _garden(story: Story) -> None:
    who = _people(story, 1)[0]
    first, second = story.rng.sample(_FLOWERS, 2)
    rows, size, lines, width = story.number(3, 9), story.number(6, 32), story.number(3, 9), story.number(6, 32)
    story.tell(
        f"{who.name} plants {rows} rows of {size} {first} and {lines} rows of {width} {second}.",
        f"In {who.name}'s garden there are {rows} rows with {size} {first} each "
        f"and {lines} rows with {width} {second} each.",
    )
    left = story.step(rows, "*", size, "There are", first)
    right = story.step(lines, "*", width, "There are", second)
    if story.rng.random() < 0.3:
        left, right = max(left, right), min(left, right)
        story.tell("What is the difference between the two numbers of flowers?")
        story.step(left, "-", right)
        return
    total = story.step(left, "+", right)
    if story.rng.random() < 0.4:
        story.tell("How many flowers are there in all?")
        return
    picked = story.number(6, max(7, min(180, total - 5)))
    story.tell(f"{who.subject} picks {picked} of the flowers. How many flowers are left?")
    story.step(total, "-", picked)


def _factory(story: Story) -> None:
    parts = story.rng.choice(_PARTS)
    rate, morning, evening = story.number(12, 75), story.number(2, 5), story.number(2, 5)
    story.tell(
        f"A machine makes {rate} {parts} an hour. It runs for {morning} hours in the morning "
        f"and {evening} hours in the evening.",
        f"A workshop makes {rate} {parts} an hour and works {morning} hours before lunch "
        f"and {evening} hours after lunch.",
    )
    hours = story.step(morning, "+", evening, after="hours")
    made = story.step(hours, "*", rate, f"In {hours} hours it makes", parts)
    if story.rng.random() < 0.3:
        story.tell(f"How many {parts} is that?", f"How many {parts} are made?")
        return
    bad = story.number(5, 90)
    story.tell(f"{bad} of the {parts} are faulty. How many {parts} are good?")
    story.step(made, "-", bad)


SCENARIOS: tuple[Callable[[Story], None], ...] = (
    _collection,
    _collection,
    _comparison,
    _bakery,
    _savings,
    _bus,
    _reading,
    _school_trip,
    _farm,
    _journey,
    _shopping,
    _garden,
    _factory,
)
