"""Small talk between the facts. Every reply follows from its message alone."""

from __future__ import annotations

import random

from evaluation.tasks.builder import DialogueBuilder, pick
from evaluation.tasks.words import words

FOODS = words("soup bread rice pasta cheese salad curry pizza cake honey pie jam")
DRINKS = words("tea coffee cocoa juice milk cider")
HOBBIES = words("chess music painting cooking hiking fishing sewing singing dancing cycling")
DAYS = ("this morning", "last night", "at noon", "on the weekend", "after work", "before lunch")
WEATHER = words("rain snow wind fog sun hail")
FRIENDS = ("my brother", "my sister", "my uncle", "my aunt", "my neighbour", "an old friend")

GREETINGS = (
    ("Hello!", "Hello! What shall I remember?"),
    ("Hi there.", "Hello! What shall I remember?"),
    ("Good morning.", "Good morning! What shall I remember?"),
    ("Good evening.", "Good evening! What shall I remember?"),
    ("Hi, can we talk?", "Of course. What shall I remember?"),
)
QUESTIONS = (
    ("What can you do?", "I remember facts, follow corrections, keep totals and track positions."),
    ("How can you help me?", "I remember facts, follow corrections, keep totals and track positions."),
    ("Who are you?", "I am a small model that remembers what you tell me."),
    ("What are you?", "I am a small model that remembers what you tell me."),
    ("How are you?", "I am well, thank you."),
    ("How are you doing today?", "I am well, thank you."),
    ("Are you still there?", "Yes, I am here."),
    ("Are you listening?", "Yes, I am here."),
    ("Thank you.", "You are welcome."),
    ("Thanks a lot!", "You are welcome."),
    ("That was quick.", "I am glad to help."),
    ("You are very kind.", "I am glad to help."),
    ("One moment, please.", "Take your time."),
    ("Wait a minute.", "Take your time."),
    ("Never mind.", "All right."),
    ("Let us go on.", "All right."),
    ("OK.", "All right."),
    ("Goodbye!", "Goodbye!"),
    ("See you tomorrow.", "Goodbye!"),
    ("Tell me something.", "I only know what you tell me."),
    ("Tell me a joke.", "I only know what you tell me."),
    ("What is your name?", "I have no name of my own."),
    ("Can you help me?", "Of course. What shall I remember?"),
    ("Can you remember something for me?", "Of course. What shall I remember?"),
    ("Please remember some things.", "Of course. What shall I remember?"),
)
STATEMENTS = (
    ("I had {food} and {drink} {day}.", "I hope the {food} was good."),
    ("We made {food} {day}.", "I hope the {food} was good."),
    ("Shall I bring {food} or {drink}?", "Bring the {food}."),
    ("I think {drink} goes well with {food}.", "So do I."),
    ("{friend} does not like {drink}.", "Not everybody does."),
    ("There was a lot of {weather} {day}.", "The {weather} will pass."),
    ("They say more {weather} is coming.", "The {weather} will pass."),
    ("The {weather} kept us inside {day}.", "I hope it clears up."),
    ("I met {friend} {day}.", "How nice to meet {friend_you}."),
    ("I have not seen {friend} for a long time.", "You could write a letter."),
    ("{friend} has taken up {hobby}.", "I hear {hobby} is fun."),
    ("Do you like {hobby}?", "I hear {hobby} is fun."),
    ("I was busy with {hobby} {day}.", "I hear {hobby} is fun."),
    ("My day was long and I am tired.", "Rest well."),
    ("I could not sleep {day}.", "Rest well."),
    ("The train was late again.", "That happens."),
    ("I lost my umbrella {day}.", "That happens."),
    ("My bus did not come {day}.", "That happens."),
)
STORY = (
    "We sat by the window and had {drink}.",
    "Then {friend} called and talked about {hobby}.",
    "There was some {weather}, so we stayed a little longer.",
    "Nobody wanted to go home yet.",
    "Later we cooked {food} for everybody.",
    "The {food} was a bit too salty, but we laughed about it.",
    "In the end {friend} told us how the {hobby} had begun.",
    "After that I read the paper and wrote a few letters.",
    "It was quiet, and the {weather} went on all day.",
    "I had not had such good {drink} for years.",
    "We spoke about {hobby} and about {food} and lost track of time.",
    "Somebody had left a coat, and we never learned whose it was.",
)
STORY_OPENINGS = ("Let me tell you about my day.", "You will not believe what happened {day}.", "It was a funny day.")
STORY_REPLY = "What a day!"


class TalkThread:
    """Greets first, then chats; `stories` is the share of long messages."""

    def __init__(self, rng: random.Random, *, stories: float, greets: bool) -> None:
        self._rng = rng
        self._stories = stories
        self._greets = greets

    def turn(self, dialogue: DialogueBuilder) -> None:
        rng = self._rng
        if self._greets:
            self._greets = False
            dialogue.tell(*pick(rng, GREETINGS))
        elif rng.random() < self._stories:
            dialogue.tell(_story(rng), STORY_REPLY)
        elif rng.random() < 0.3:
            dialogue.tell(*pick(rng, QUESTIONS))
        else:
            text, reply = pick(rng, STATEMENTS)
            drawn = _draw_words(rng)
            dialogue.tell(_sentence(text.format(**drawn)), reply.format(**drawn))


def _draw_words(rng: random.Random) -> dict[str, str]:
    friend = pick(rng, FRIENDS)
    return {
        "food": pick(rng, FOODS),
        "drink": pick(rng, DRINKS),
        "hobby": pick(rng, HOBBIES),
        "day": pick(rng, DAYS),
        "weather": pick(rng, WEATHER),
        "friend": friend,
        "friend_you": friend.replace("my ", "your "),
    }


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]


def _story(rng: random.Random) -> str:
    drawn = _draw_words(rng)
    count = 2 + int(rng.random() * 7)
    lines = [pick(rng, STORY_OPENINGS), *(pick(rng, STORY) for _ in range(count))]
    return " ".join(lines).format(**drawn)
