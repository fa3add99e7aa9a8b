"""Made-up documents in which facts are said once and asked for much later, many times: what texts seldom do and users of
long contexts often. Facts and questions take many forms, between paragraphs of real texts; passages come back word for
word. A number seeds each document."""
import json
import random

FIRST = ("Morgan Avery Quinn Riley Jordan Casey Rowan Skyler Emerson Finley Harper Hayden Jamie Kendall Lennon Marlow "
         "Nico Oakley Parker Reese Sawyer Tatum Winter Arden Blair Dakota Ellis Frankie Gray Indigo").split()
LAST = ("Abbott Barlow Castell Dunmore Eastman Fairley Grantham Holloway Ingram Jessop Kirkby Lockhart Merriman Norcross "
        "Oakes Pemberton Quill Radcliffe Stanhope Thornbury Underhill Vaughan Whitlock Yardley").split()
NOUNS = ("anchor beacon canyon delta ember falcon glacier harvest island jasper kernel lantern meadow nectar opal prairie "
         "quartz ridge summit timber umbra valley willow zephyr copper marble saffron cobalt velvet thunder").split()
CITIES = ("Lisbon Oslo Quito Tunis Vienna Zagreb Hanoi Lima Dakar Perth Osaka Turin Leeds Bergen Malmo Cadiz Graz Split "
          "Varna Izmir").split()


class Facts:
    """Keys that are all different, with values, in one of several forms: (said, asked) texts of one."""

    def __init__(self, rng, count):
        self.rng, self.form = rng, rng.choice(self.FORMS)
        names = [f"{a} {b}" for a in FIRST for b in LAST]
        words = [f"{a}-{b}" for a in NOUNS for b in NOUNS if a != b]
        keys = rng.sample(names if self.form in self.OF_PEOPLE else words, count)
        self.all = [(key, self.value()) for key in keys]

    def value(self):
        r = self.rng
        return r.choice((lambda: str(r.randrange(100, 10 ** r.randrange(3, 8))), lambda: f"{r.getrandbits(32):08x}",
                         lambda: r.choice(CITIES), lambda: f"{r.choice(NOUNS)} {r.choice(NOUNS)}",
                         lambda: f"{r.randrange(1, 29):02d}/{r.randrange(1, 13):02d}/{r.randrange(1950, 2030)}"))()

    def code(key, value):
        return f"The access code of {key} is {value}.", f"Which access code does {key} have? It is {value}."

    def phone(key, value):
        return f"{key}: {value}\n", f"{key}: {value}\n"

    def config(key, value):
        return f"{key} = {value}\n", f"print(config['{key}'])  # {value}\n"

    def jsons(key, value):
        return json.dumps({"id": key, "value": value}) + "\n", f"Q: value of {key}\nA: {value}\n"

    def lives(key, value):
        return f"{key} keeps a note that says {value}. ", f"What does the note of {key} say? It says {value}. "

    def row(key, value):
        return f"| {key} | {value} |\n", f"Look up {key} in the table: {value}\n"

    FORMS = (code, phone, config, jsons, lives, row)
    OF_PEOPLE = (code, phone, lives)

    def said(self, i):
        return self.form(*self.all[i])[0]

    def asked(self, i):
        return self.form(*self.all[i])[1]


def document(seed, paragraphs, characters):
    """One text of about so many characters: facts among paragraphs in its first part, among more of them facts asked
    for, passages said again and lists copied in its second."""
    rng = random.Random(seed)
    facts = Facts(rng, rng.randrange(8, 60))
    first, second, length = [], [], 0
    order = list(range(len(facts.all)))
    left = rng.sample(order, len(order))  # to be asked for: all of them before one comes again
    share = rng.uniform(0.35, 0.65)
    dense = rng.random() < 0.4  # all facts in one place
    passages = rng.sample(paragraphs, 12)
    places = sorted(rng.uniform(0, 1) for _ in order)
    if dense:
        first.append("".join(facts.said(i) for i in order))
        places = []
    while length < share * characters:
        text = rng.choice(passages if rng.random() < 0.2 else paragraphs) + "\n\n"
        first.append(text)
        length += len(text)
        while places and places[0] * share * characters < length:
            first.append(facts.said(len(order) - len(places)) + "\n")
            places.pop(0)
    first += [facts.said(len(order) - len(places) + j) for j in range(len(places))]
    while length < characters:
        kind = rng.random()
        if kind < 0.55:
            some = rng.randrange(1, 6)
            asked, left = left[:some], left[some:] or rng.sample(order, len(order))
            text = "".join(facts.asked(i) + "\n" for i in asked)
        elif kind < 0.75:
            text = rng.choice(passages) + "\n\n"
        elif kind < 0.8 and dense:
            text = "".join(facts.said(i) for i in order[:rng.randrange(4, 20)]) + "\n"
        else:
            text = rng.choice(paragraphs) + "\n\n"
        second.append(text)
        length += len(text)
    return "".join(first + second)


def documents(texts, count, characters=40000):
    """(name, text) of `count` of them, with paragraphs of `texts`."""
    paragraphs = [p.strip() for text in texts for p in text.split("\n\n") if 150 < len(p.strip()) < 900]
    for seed in range(count):
        yield f"recall/{seed}", document(seed, paragraphs, characters)
