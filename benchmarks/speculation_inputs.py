"""The prompts of speculation.py: kinds whose answers repeat the prompt, free chat, and forms. All text is our own."""

import json
from typing import Any

_REPORTS = (
    """Minutes of the harbour council, 3 March. The chair opened the meeting at nine and welcomed the two new members
from the pilots' union. The north crane was out of service for eleven days in February because a hydraulic
seal had failed twice. The maintenance contractor has now replaced the pump as well as the seal, and the crane
lifted its full load in the test on Friday. The council agreed to pay half of the bill and to keep the other
half until the crane has worked for sixty days without a fault. Dredging of the inner basin will begin on 2
April and will take five weeks. During that time ships longer than 140 metres must use the outer quay, and the
tug fee for them is waived. The fishing cooperative asked for more ice. A second ice plant would cost 84,000
and could be running by July. The council asked the treasurer to find out whether the regional fund would pay
a third of that sum. The next meeting is on 7 April at nine.""",
    """Incident report for the night of 14 May. At 01:12 the primary database stopped accepting writes because its
disk was full. The alert for disk space had fired at 23:40, but the page went to a phone that was switched
off. At 01:20 the second engineer on call noticed that orders were failing and opened an incident. At 01:31
she deleted the archived query logs, which freed 60 gigabytes, and writes were accepted again. Between 01:12
and 01:31 a total of 2,410 orders failed. Of these, 2,377 were retried by the shops without our help, and 33
were entered by hand the next morning. The logs had grown because a debug setting was left on after the
release of 11 May. We have turned the setting off, we rotate these logs every hour, and an alert that is not
confirmed in five minutes now goes to the second engineer. We will also move the archive to another disk
before the end of the month.""",
    """Field notes on the reed warblers of Lake Orin, second season. We ringed 118 adult birds between 20 April and
15 August, eleven more than in the first season. Of the adults ringed last year, 41 came back, which is a
return rate of 38 per cent. The first egg was found on 9 May, six days earlier than last year, probably
because the reeds were already tall after a mild winter. We followed 64 nests. In 37 of them at least one
chick left the nest. Cuckoos used nine nests, and in seven of these the warblers accepted the foreign egg.
Water levels rose by 30 centimetres in the first week of June and flooded twelve nests on the east shore,
while the west shore lost none. We suggest that the sluice at Orin mill stays open until the end of July. A
third season is needed to separate the effect of the weather from that of the water level.""",
    """Notice to all residents of Elm Court. The lifts in both stairways will be replaced this autumn. Work on the
left lift begins on 8 September and ends on 3 October. Work on the right lift begins on 6 October and ends on
31 October. While one lift is closed, please use the other stairway: the passage on the fifth floor will be
open day and night. Residents who cannot climb stairs should call the caretaker by 25 August, so that we can
arrange help with shopping and with doctor's visits. Deliveries of furniture are not possible between 8
September and 31 October. The noisy part of the work takes place on weekdays between nine and four, never on
Sundays. The costs of 212,000 are paid from the reserve, and the monthly charge does not change. A meeting
with the builder takes place on 20 August at seven in the evening, in the laundry room of the left stairway.""",
    """Summary of the trial of the new bus lane on Mill Road. The lane was open from January to June and was used by
the lines 4, 9 and 22. In the morning peak, buses needed 11 minutes from the station to the bridge, compared
with 17 minutes in the year before. Cars needed 14 minutes, compared with 13 minutes before. The number of
passengers on the three lines grew by 9 per cent, while it grew by 2 per cent on lines without the lane. There
were four accidents with cyclists, one fewer than in the year before. Shop owners reported 6 per cent fewer
deliveries on time, because vans may not stop in the lane before ten. Of 1,900 people who answered the survey,
61 per cent want to keep the lane, 27 per cent want to remove it and the others have no opinion. The
department proposes to keep the lane, to open it for deliveries at nine, and to paint it red where bicycles
cross.""",
    """Letter to the members of the orchard society. The frost on the night of 24 April destroyed about a third of
the apple blossom, and nearly all of the apricots. The pears on the upper slope were not touched. We therefore
expect 9 tonnes of apples, compared with 14 tonnes last year. The press will open on 12 September and will run
on Saturdays only. Members pay 40 cents for a litre, others pay 60 cents. Please bring clean fruit in sacks of
at most 20 kilograms, and write your name on every sack. The old press cloths have been replaced, and the
pasteuriser now has a thermometer that works. Two of the ladders broke last season, so please do not stand on
the top step. We need six helpers on each Saturday, for four hours, and each helper gets ten litres of juice.
If you can help, write to the secretary before the end of August.""",
)

_PROGRAMS = (
    '''class Stack:
    """A stack of limited size."""

    def __init__(self, limit):
        self.limit = limit
        self.items = []

    def push(self, item):
        if len(self.items) >= self.limit:
            raise OverflowError("the stack is full")
        self.items.append(item)

    def pop(self):
        if not self.items:
            raise IndexError("the stack is empty")
        return self.items.pop()

    def peek(self):
        if not self.items:
            raise IndexError("the stack is empty")
        return self.items[-1]

    def __len__(self):
        return len(self.items)''',
    """def read_orders(path):
    orders = []
    with open(path) as file:
        for line in file:
            line = line.strip()
            if not line or line.startswith("#"):
                continue
            number, customer, amount = line.split(",")
            orders.append({"number": int(number), "customer": customer, "amount": float(amount)})
    return orders


def total_by_customer(orders):
    totals = {}
    for order in orders:
        customer = order["customer"]
        totals[customer] = totals.get(customer, 0.0) + order["amount"]
    return totals


def largest_order(orders):
    largest = None
    for order in orders:
        if largest is None or order["amount"] > largest["amount"]:
            largest = order
    return largest""",
    """import math


class Circle:
    def __init__(self, radius):
        self.radius = radius

    def area(self):
        return math.pi * self.radius ** 2

    def perimeter(self):
        return 2 * math.pi * self.radius


class Rectangle:
    def __init__(self, width, height):
        self.width = width
        self.height = height

    def area(self):
        return self.width * self.height

    def perimeter(self):
        return 2 * (self.width + self.height)


def total_area(shapes):
    total = 0
    for shape in shapes:
        total += shape.area()
    return total""",
    """def binary_search(values, wanted):
    low, high = 0, len(values) - 1
    while low <= high:
        middle = (low + high) // 2
        if values[middle] == wanted:
            return middle
        if values[middle] < wanted:
            low = middle + 1
        else:
            high = middle - 1
    return -1


def merge(left, right):
    merged = []
    i = j = 0
    while i < len(left) and j < len(right):
        if left[i] <= right[j]:
            merged.append(left[i])
            i += 1
        else:
            merged.append(right[j])
            j += 1
    merged.extend(left[i:])
    merged.extend(right[j:])
    return merged""",
    """class Account:
    def __init__(self, owner, balance=0):
        self.owner = owner
        self.balance = balance
        self.history = []

    def deposit(self, amount):
        if amount <= 0:
            raise ValueError("the amount must be positive")
        self.balance += amount
        self.history.append(("deposit", amount))

    def withdraw(self, amount):
        if amount <= 0:
            raise ValueError("the amount must be positive")
        if amount > self.balance:
            raise ValueError("the balance is too low")
        self.balance -= amount
        self.history.append(("withdraw", amount))

    def transfer(self, other, amount):
        self.withdraw(amount)
        other.deposit(amount)""",
    """def word_counts(text):
    counts = {}
    for word in text.lower().split():
        word = word.strip(".,;:!?")
        if word:
            counts[word] = counts.get(word, 0) + 1
    return counts


def most_common(counts, number):
    pairs = sorted(counts.items(), key=lambda pair: pair[1], reverse=True)
    return pairs[:number]


def print_report(text, number):
    counts = word_counts(text)
    print("words:", sum(counts.values()))
    print("different words:", len(counts))
    for word, count in most_common(counts, number):
        print(word, count)""",
)

_RECORDS = (
    (
        '{"name": "Maria Lindt", "city": "Graz", "age": 34, "job": "nurse"}',
        """Maria Lindt lives in Graz, is 34 years old and works as a nurse. Tom Okafor lives in Leeds, is 51 years old
and works as a baker. Yuki Mori lives in Osaka, is 28 years old and works as a pilot. Ana Reyes lives in
Quito, is 45 years old and works as a teacher. Ivan Petrov lives in Sofia, is 39 years old and works as a
cook. Lena Holm lives in Bergen, is 62 years old and works as a lawyer. Omar Haddad lives in Amman, is 23
years old and works as a painter. Ruth Cohen lives in Haifa, is 57 years old and works as a dentist.""",
    ),
    (
        '{"ship": "Aurora", "flag": "Norway", "length": 182, "cargo": "timber"}',
        """The ship Aurora sails under the flag of Norway, is 182 metres long and carries timber. The ship Belinda sails
under the flag of Malta, is 229 metres long and carries grain. The ship Corona sails under the flag of Panama,
is 366 metres long and carries containers. The ship Dorado sails under the flag of Spain, is 144 metres long
and carries cars. The ship Electra sails under the flag of Greece, is 274 metres long and carries oil. The
ship Fortuna sails under the flag of Japan, is 190 metres long and carries steel.""",
    ),
    (
        '{"order": 1041, "item": "desk lamps", "quantity": 12, "price": 24.90}',
        """Order 1041 is for 12 desk lamps at 24.90 each. Order 1042 is for 3 office chairs at 189.00 each. Order 1043
is for 50 notebooks at 2.40 each. Order 1044 is for 8 whiteboards at 75.50 each. Order 1045 is for 20 keyboards
at 39.90 each. Order 1046 is for 6 monitors at 210.00 each. Order 1047 is for 100 pens at 0.80 each. Order
1048 is for 15 phone stands at 12.30 each. Order 1049 is for 4 printers at 149.00 each.""",
    ),
    (
        '{"city": "Lisbon", "country": "Portugal", "temperature": 24, "weather": "sunny"}',
        """In Lisbon, Portugal, the temperature is 24 degrees and the weather is sunny. In Oslo, Norway, the temperature
is 11 degrees and the weather is rainy. In Cairo, Egypt, the temperature is 33 degrees and the weather is
sunny. In Lima, Peru, the temperature is 19 degrees and the weather is cloudy. In Hanoi, Vietnam, the
temperature is 30 degrees and the weather is stormy. In Dublin, Ireland, the temperature is 14 degrees and the
weather is windy. In Nairobi, Kenya, the temperature is 22 degrees and the weather is cloudy.""",
    ),
    (
        '{"title": "The Long Quay", "author": "Edda Brandt", "year": 1987, "pages": 312}',
        """The Long Quay was written by Edda Brandt in 1987 and has 312 pages. Salt and Iron was written by Paul Nakata
in 2003 and has 448 pages. A Winter of Bees was written by Clara Osei in 2011 and has 205 pages. The Ninth
Bridge was written by Mikael Strand in 1996 and has 530 pages. Letters from Orin was written by Edda Brandt in
1992 and has 276 pages. Small Engines was written by Jonah Price in 2019 and has 190 pages. The Glass Orchard
was written by Clara Osei in 2015 and has 341 pages.""",
    ),
    (
        '{"flight": "CD101", "origin": "Vienna", "destination": "Madrid", "gate": "B12"}',
        """Flight CD101 goes from Vienna to Madrid and leaves from gate B12. Flight CD118 goes from Vienna to Helsinki
and leaves from gate A4. Flight CD127 goes from Zurich to Athens and leaves from gate C31. Flight CD133 goes
from Prague to Dublin and leaves from gate A9. Flight CD140 goes from Zurich to Warsaw and leaves from gate
B2. Flight CD155 goes from Vienna to Porto and leaves from gate C17. Flight CD162 goes from Prague to Rome and
leaves from gate A1.""",
    ),
)

_QUESTIONS = (
    "Tell me a story about a lighthouse keeper who finds a letter.",
    "Explain to a child why the sky is blue and sunsets are red.",
    "What should I think about before I adopt a dog from a shelter?",
    "Write a speech for the opening of a small village library.",
    "How do bridges carry heavy loads? Describe three kinds of bridges.",
    "Give me advice for my first week in a new job as a project manager.",
)


_FURTHER_REPORTS = (
    """Report of the water works for the second quarter. The old main under Canal Street was replaced over a length of
430 metres, and losses in that district fell from 19 to 7 per cent. Two of the four pumps at the spring house are
now driven by the sun between ten and four. Samples were taken at 26 points every week. All of them were within
the limits for nitrate, and one sample in May was above the limit for iron, because a hydrant nearby had been
opened for a fire drill. The price for a cubic metre stays at 1.92. In the autumn the basin on Fern Hill will be
emptied and cleaned for nine days, and the upper villages will get their water from the lake during that time.""",
    """Letter from the choir to its singers. The summer concert takes place on 21 June in the old brewery, because the
church is being painted. We sing the mass in D and five songs by living composers. The last three rehearsals
begin at six and not at seven. Please bring a black folder and a small lamp that can be clipped to it: the light
in the brewery is weak. The second altos are still two voices short. If you know anybody who reads music and is
free on Tuesdays, ask them to come. Travel to the festival in Lund is paid by the city, but meals are not.""",
    """Notes on the repair of the clock tower. The pendulum was taken down on Monday and weighed: it has lost 1.4
kilograms to rust since 1911. The escapement is worn on one side only, which explains why the clock gained four
minutes in a week and then lost three. A new wheel will be cut from bronze in the workshop of the technical
school. Until it is ready, the hands stay at twelve. The bell is struck by hand at noon and at six. Pigeons have
nested behind the north face, and the scaffold there will go up only after the young birds have left.""",
)

_FURTHER_PROGRAMS = (
    """def parse_line(line):
    name, _, value = line.partition("=")
    return name.strip(), value.strip()


def read_settings(path):
    settings = {}
    with open(path) as file:
        for line in file:
            if line.strip() and not line.startswith("#"):
                name, value = parse_line(line)
                settings[name] = value
    return settings


def write_settings(path, settings):
    with open(path, "w") as file:
        for name, value in sorted(settings.items()):
            file.write(f"{name} = {value}\\n")""",
    """class Queue:
    def __init__(self):
        self.head = None
        self.tail = None
        self.size = 0

    def put(self, value):
        node = Node(value)
        if self.tail is None:
            self.head = node
        else:
            self.tail.next = node
        self.tail = node
        self.size += 1

    def get(self):
        if self.head is None:
            raise IndexError("the queue is empty")
        node = self.head
        self.head = node.next
        if self.head is None:
            self.tail = None
        self.size -= 1
        return node.value""",
    """def mean(values):
    return sum(values) / len(values)


def variance(values):
    middle = mean(values)
    return mean([(value - middle) ** 2 for value in values])


def correlation(first, second):
    x, y = mean(first), mean(second)
    shared = mean([(a - x) * (b - y) for a, b in zip(first, second)])
    return shared / (variance(first) * variance(second)) ** 0.5


def moving_mean(values, width):
    found = []
    for end in range(width, len(values) + 1):
        found.append(mean(values[end - width : end]))
    return found""",
)

_FURTHER_RECORDS = (
    (
        '{"river": "Arn", "length": 214, "source": "Mount Hale", "mouth": "Port Evans"}',
        """The Arn is 214 kilometres long, rises on Mount Hale and ends at Port Evans. The Bessel is 97 kilometres long,
rises in Lake Tarn and ends at Oldmouth. The Cray is 351 kilometres long, rises in the Grey Hills and ends at
Sandhaven. The Dunn is 68 kilometres long, rises at Kettle Moor and ends at Lowport. The Esk is 182 kilometres
long, rises on Mount Avery and ends at Westbay.""",
    ),
    (
        '{"room": 114, "guest": "Nils Aber", "nights": 3, "breakfast": true}',
        """Room 114 is taken by Nils Aber for 3 nights with breakfast. Room 118 is taken by Carla Font for 1 night
without breakfast. Room 203 is taken by Jun Sato for 6 nights with breakfast. Room 209 is taken by Peter Vale for 2
nights without breakfast. Room 311 is taken by Asha Rao for 4 nights with breakfast.""",
    ),
    (
        '{"part": "K-20", "name": "hinge", "stock": 412, "shelf": "4C"}',
        """Part K-20 is a hinge, 412 are in stock, and it lies on shelf 4C. Part K-31 is a bracket, 88 are in stock, and
it lies on shelf 2A. Part K-47 is a spring, 1,250 are in stock, and it lies on shelf 7F. Part L-02 is a handle, 64
are in stock, and it lies on shelf 1B. Part L-15 is a lock, 139 are in stock, and it lies on shelf 3D.""",
    ),
)

_FURTHER_QUESTIONS = (
    "Describe how bread is made, from the grain to the table.",
    "Which three inventions changed travel the most, and why?",
    "Write a short fable about a crow that collects clocks.",
)


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def _text(most: int) -> dict[str, Any]:
    return {"type": "string", "maxLength": most}


def _list(items: dict[str, Any], least: int, most: int) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


_NUMBER = {"type": "integer", "minimum": 0, "maximum": 9999}

FORMS: tuple[tuple[str, str], ...] = tuple(
    (question, json.dumps(schema))
    for question, schema in (
        (
            "Invent a person who rents a flat, as JSON.",
            _object(
                first_name=_text(20), family_name=_text(20), date_of_birth={"type": "string", "format": "date"},
                monthly_income=_NUMBER, employment_status={"enum": ["employed", "self-employed", "retired", "student"]},
                has_pets={"type": "boolean"},
            ),
        ),
        (
            "Invent an order of office supplies with three items, as JSON.",
            _object(
                order_number=_NUMBER, customer_name=_text(24), shipping_method={"enum": ["standard", "express"]},
                line_items=_list(_object(description=_text(24), quantity=_NUMBER, unit_price_cents=_NUMBER), 3, 3),
            ),
        ),
        (
            "Report a fault of a printer as JSON.",
            _object(
                error_category={"enum": ["paper jam", "no network", "empty cartridge", "unknown"]},
                severity_level={"enum": ["low", "medium", "high", "critical"]}, affected_device=_text(24),
                steps_to_reproduce=_list(_text(40), 2, 3), requires_technician={"type": "boolean"},
            ),
        ),
        (
            "Describe the weather of tomorrow in a town by the sea, as JSON.",
            _object(
                location=_object(latitude={"type": "number"}, longitude={"type": "number"}, town_name=_text(20)),
                temperature_celsius={"type": "integer", "minimum": -30, "maximum": 45},
                wind_direction={"enum": ["north", "east", "south", "west"]}, precipitation_millimetres=_NUMBER,
                weather_warning={"type": "boolean"},
            ),
        ),
        (
            "Give a recipe for pancakes as JSON.",
            _object(
                recipe_name=_text(24), preparation_minutes=_NUMBER, number_of_servings=_NUMBER,
                ingredients=_list(_object(ingredient_name=_text(20), amount_in_grams=_NUMBER), 3, 4),
                difficulty={"enum": ["easy", "moderate", "difficult"]},
            ),
        ),
        (
            "Plan a train journey from Vienna to Madrid with two changes, as JSON.",
            _object(
                departure_station=_text(20), arrival_station=_text(20),
                connections=_list(_object(change_at_station=_text(20), waiting_minutes=_NUMBER), 2, 2),
                ticket_class={"enum": ["first class", "second class"]}, total_price_cents=_NUMBER,
                seat_reservation_required={"type": "boolean"},
            ),
        ),
    )
)  # fmt: skip
"""Questions in a chat, each with the JSON schema that the answer must follow."""


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _workloads(
    reports: tuple[str, ...],
    programs: tuple[str, ...],
    records: tuple[tuple[str, str], ...],
    questions: tuple[str, ...],
) -> dict[str, tuple[str, ...]]:
    return {
        "quotes": tuple(
            f"The text:\n\n{_one_line(text)}\n\nRepeat it word by word, with the most important sentence in bold."
            for text in reports
        ),
        "edits": tuple(
            f"The program:\n\n```python\n{text}\n```\n\n"
            "The same program, with a comment in each function:\n\n```python\n"
            for text in programs
        ),
        "json": tuple(
            f"The text:\n\n{_one_line(text)}\n\n"
            f"As JSON, one object in each line:\n\n{first}\n{first.partition(':')[0]}:"
            for first, text in records
        ),
        "chat": questions,
    }


WORKLOADS = _workloads(_REPORTS, _PROGRAMS, _RECORDS, _QUESTIONS)
"""Prompts by workload. Answers to all but `chat` repeat parts of the prompt, as far as the model does what is asked."""

UNSEEN_WORKLOADS = _workloads(_FURTHER_REPORTS, _FURTHER_PROGRAMS, _FURTHER_RECORDS, _FURTHER_QUESTIONS)
"""Prompts that were written after the policy's first guesses were chosen: for `speculation.py --offline`."""

CHATS = ("quotes", "chat")
"""Workloads that are asked for in a chat. The prompts of others are continued: a small model copies better so."""
