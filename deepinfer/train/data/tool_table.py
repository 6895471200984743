"""The named tools of the tool-call dialogues: declarations, ways to ask for them, results and how to report them."""
# ruff: noqa: E501 (template tables read better with one entry a line)

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Parameter:
    """`kind`: s string, i integer, n number, b boolean, l list of strings, or an enum such as "low|high".

    `slot` names the value generator; `ask` is the sentence that mentions an optional parameter (required ones have none).
    """

    name: str
    kind: str
    description: str
    slot: str = ""
    ask: str = ""

    def schema(self) -> dict[str, Any]:
        if "|" in self.kind:
            return {"type": "string", "enum": self.kind.split("|")}
        types = {"s": "string", "i": "integer", "n": "number", "b": "boolean"}
        schema: dict[str, Any] = (
            {"type": "array", "items": {"type": "string"}} if self.kind == "l" else {"type": types[self.kind]}
        )
        return schema | ({"description": self.description} if self.description else {})


@dataclass(frozen=True)
class ToolSpec:
    """`requests`, `result` and `answer` are string.Template texts over the arguments and a few random slots."""

    name: str
    description: str
    parameters: tuple[Parameter, ...]
    requests: tuple[str, ...]
    result: str
    answer: str


def _tool(
    name: str, description: str, parameters: list[tuple[str, ...]], requests: str, result: str, answer: str
) -> ToolSpec:
    return ToolSpec(
        name, description, tuple(Parameter(*p) for p in parameters), tuple(requests.split("|")), result, answer
    )


TOOLS = [
    _tool("get_weather", "Get the current weather for a city.", [("city", "s", "City name", "town"), ("unit", "celsius|fahrenheit", "", "", "Use $unit.")],
          "What is the weather in $city?|How is the weather in $city today?|Is it cold in $city?|Tell me the weather for $city.", '{"temperature": $n, "sky": "$sky"}', "It is $n degrees and $sky in $city."),
    _tool("get_forecast", "Get the weather forecast for some days.", [("city", "s", "City name", "town"), ("days", "i", "Number of days", "small")],
          "What will the weather be in $city for the next $days days?|Give me a $days day forecast for $city.", '{"forecast": "$sky"}', "The forecast for $city is $sky."),
    _tool("set_alarm", "Set an alarm.", [("time", "s", "Time as HH:MM", "time"), ("label", "s", "Name of the alarm", "object", "Call it $label.")],
          "Wake me up at $time.|Set an alarm for $time.|I need an alarm at $time.", '{"status": "ok"}', "The alarm is set for $time."),
    _tool("set_timer", "Start a timer.", [("minutes", "i", "Length in minutes", "number")],
          "Set a timer for $minutes minutes.|Start a $minutes minute timer.|Tell me when $minutes minutes are over.", '{"status": "started"}', "The timer is running for $minutes minutes."),
    _tool("send_message", "Send a text message to a person.", [("to", "s", "Who gets the message", "name"), ("text", "s", "The message", "message")],
          'Send a message to $to: "$text"|Tell $to "$text"|Write "$text" to $to.', '{"sent": true}', "I sent your message to $to."),
    _tool("send_email", "Send an email.", [("recipient", "s", "Email address", "email"), ("subject", "s", "Subject line", "topic"), ("body", "s", "Text of the email", "message", 'Write "$body"')],
          "Send an email to $recipient about $subject.|Email $recipient with the subject $subject.", '{"status": "sent"}', "I sent the email to $recipient."),
    _tool("search_web", "Search the web.", [("query", "s", "Search words", "topic"), ("limit", "i", "Number of results", "small", "Show $limit results.")],
          "Search the web for $query.|Look up $query.|Find pages about $query.|Search for $query.", '{"results": ["All about $query"]}', "I found a page called All about $query."),
    _tool("search_notes", "Search the notes of the user.", [("text", "s", "Text to find", "object")],
          "Find my notes about $text.|Do I have a note with the word $text?|Search my notes for $text.", '{"notes": ["Buy a $text on $day"]}', "Your note says: Buy a $text on $day."),
    _tool("create_note", "Save a note.", [("title", "s", "Title", "object"), ("content", "s", "Text of the note", "message")],
          'Make a note called $title that says "$content"|Save the note "$content" under the title $title.', '{"id": $n}', "I saved the note $title."),
    _tool("add_event", "Add an event to the calendar.", [("title", "s", "Name of the event", "event"), ("day", "s", "Day of the week", "day"), ("hour", "i", "Hour, 0 to 23", "hour")],
          "Add a $title on $day at $hour o'clock.|Put a $title into my calendar for $day at $hour o'clock.|I have a $title on $day at $hour.", '{"added": true}', "I added the $title on $day."),
    _tool("list_events", "List the events of a day.", [("day", "s", "Day of the week", "day")],
          "What do I have on $day?|Show my calendar for $day.|Am I free on $day?", '{"events": ["$event at $hour"]}', "On $day you have a $event at $hour."),
    _tool("convert_currency", "Convert an amount of money.", [("amount", "n", "How much", "number"), ("source", "USD|EUR|GBP|JPY", ""), ("target", "CHF|SEK|INR|CAD", "")],
          "How much is $amount $source in $target?|Convert $amount $source to $target.|Change $amount $source into $target.", '{"amount": $n}', "$amount $source is $n $target."),
    _tool("convert_length", "Convert a length.", [("value", "n", "The length", "number"), ("from_unit", "cm|m|km|mile", ""), ("to_unit", "inch|foot|yard", "")],
          "Convert $value $from_unit to $to_unit.|How many $to_unit are $value $from_unit?", '{"result": $n}', "$value $from_unit is $n $to_unit."),
    _tool("calculate", "Compute an expression.", [("expression", "s", "Arithmetic expression", "expression")],
          "Compute $expression.|What is $expression?|Use the calculator: $expression", '{"result": $n}', "The result is $n."),
    _tool("translate", "Translate text.", [("text", "s", "Text to translate", "message"), ("language", "s", "Target language", "language")],
          'Translate "$text" into $language.|How do you say "$text" in $language?', '{"translation": "$word"}', "In $language that is: $word"),
    _tool("play_music", "Play music.", [("title", "s", "Song or artist", "title"), ("volume", "i", "0 to 100", "number", "Set the volume to $volume.")],
          "Play $title.|I want to hear $title.|Put on $title, please.", '{"playing": "$title"}', "Now playing $title."),
    _tool("turn_on_light", "Turn on the light in a room.", [("room", "s", "Name of the room", "room"), ("color", "s", "Colour of the light", "colour", "Make it $color.")],
          "Turn on the light in the $room.|Light in the $room, please.|It is dark in the $room.", '{"light": "on"}', "The light in the $room is on."),
    _tool("set_temperature", "Set the heating.", [("room", "s", "Name of the room", "room"), ("degrees", "i", "Degrees Celsius", "warmth")],
          "Set the $room to $degrees degrees.|Heat the $room to $degrees degrees.|I want $degrees degrees in the $room.", '{"status": "ok"}', "The $room is set to $degrees degrees."),
    _tool("lock_door", "Lock or unlock a door.", [("door", "s", "Which door", "room"), ("locked", "b", "True to lock")],
          "Set the $door door to locked: $locked.|The $door door: locked $locked, please.", '{"status": "done"}', "The $door door is done."),
    _tool("order_food", "Order food.", [("dish", "s", "What to order", "food"), ("quantity", "i", "How many", "small"), ("address", "s", "Where to bring it", "town", "Bring it to $address.")],
          "Order $quantity portions of $dish.|I would like $quantity times $dish.|Get me $quantity of the $dish.", '{"minutes": $n}', "Your $dish will come in $n minutes."),
    _tool("find_recipe", "Find a recipe.", [("ingredients", "l", "What to cook with", "foods"), ("vegetarian", "b", "Without meat", "", "Vegetarian: $vegetarian.")],
          "Find a recipe with $ingredients.|What can I cook with $ingredients?", '{"recipe": "$food pie"}', "You could make $food pie."),
    _tool("book_table", "Book a table in a restaurant.", [("restaurant", "s", "Name", "title"), ("people", "i", "Number of guests", "small"), ("time", "s", "Time as HH:MM", "time")],
          "Book a table for $people at $restaurant at $time.|Reserve a table at $restaurant for $people people at $time.", '{"booked": true}', "Your table at $restaurant is booked for $time."),
    _tool("book_train", "Book a train ticket.", [("origin", "s", "Start", "town"), ("destination", "s", "End", "town2"), ("day", "s", "Day of travel", "day")],
          "Book a train from $origin to $destination on $day.|I need a train ticket from $origin to $destination for $day.", '{"seat": $n}', "Your seat on the train to $destination is number $n."),
    _tool("find_route", "Find the way between two places.", [("start", "s", "Start", "town"), ("end", "s", "Goal", "town2"), ("mode", "walk|bike|car|bus", "", "", "I go by $mode.")],
          "How do I get from $start to $end?|Show me the way from $start to $end.", '{"minutes": $n}', "The way to $end takes $n minutes."),
    _tool("get_time", "Get the current time in a city.", [("city", "s", "City name", "town")],
          "What time is it in $city?|Tell me the time in $city.", '{"time": "$time"}', "It is $time in $city."),
    _tool("get_stock_price", "Get the price of a stock.", [("symbol", "s", "Ticker symbol", "symbol")],
          "What is the price of $symbol?|How is $symbol doing?|Get the stock price of $symbol.", '{"price": $n}', "$symbol is at $n."),
    _tool("read_file", "Read a file.", [("path", "s", "Path of the file", "path")],
          "Read the file $path.|Show me $path.|What is in $path?|Open $path.", '{"content": "$word"}', "The file says: $word"),
    _tool("write_file", "Write text to a file.", [("path", "s", "Path of the file", "path"), ("content", "s", "Text to write", "message")],
          'Write "$content" to $path.|Save "$content" in the file $path.', '{"bytes": $n}', "I wrote the file $path."),
    _tool("run_command", "Run a shell command.", [("command", "s", "Command line", "command"), ("timeout", "i", "Seconds", "number", "Stop after $timeout seconds.")],
          "Run `$command`.|Execute `$command`.|Please run the command `$command`.", '{"exit_code": 0}', "The command `$command` ran without an error."),
    _tool("lookup_contact", "Find a person in the address book.", [("name", "s", "Name of the person", "name")],
          "What is the phone number of $name?|Look up $name in my contacts.|Find the contact $name.", '{"phone": "$phone"}', "The number of $name is $phone."),
    _tool("call_person", "Start a phone call.", [("name", "s", "Whom to call", "name")],
          "Call $name.|Phone $name, please.|I want to talk to $name.", '{"status": "calling"}', "I am calling $name."),
    _tool("add_to_list", "Add items to a list.", [("list", "shopping|todo|packing", ""), ("items", "l", "Items to add", "foods")],
          "Add $items to my $list list.|Put $items on the $list list.", '{"count": $n}', "The $list list now has $n items."),
    _tool("get_definition", "Look up the meaning of a word.", [("word", "s", "The word", "object")],
          "What does the word $word mean?|Define $word.|Look up the word $word.", '{"meaning": "a useful thing"}', "The word $word means: a useful thing."),
    _tool("track_package", "Find out where a package is.", [("number", "s", "Tracking number", "code")],
          "Where is my package $number?|Track $number.|Has the package $number come?", '{"place": "$place"}', "Your package is at the $place."),
    _tool("create_user", "Create a user account.", [("username", "s", "Login name", "code"), ("age", "i", "Age in years", "number"), ("admin", "b", "Administrator", "", "Administrator: $admin.")],
          "Create an account $username for a user who is $age years old.|Make a user $username, age $age.", '{"id": $n}', "The account $username has the number $n."),
    _tool("get_news", "Get the latest news about a topic.", [("topic", "s", "Topic", "topic"), ("count", "i", "Number of articles", "small", "$count articles, please.")],
          "What is new about $topic?|Show me the news about $topic.", '{"headline": "More people like $topic"}', "The latest headline is: More people like $topic."),
    _tool("roll_dice", "Roll dice.", [("sides", "i", "Sides of a die", "number"), ("count", "i", "How many dice", "small")],
          "Roll $count dice with $sides sides.|Throw $count dice, each with $sides sides.", '{"sum": $n}', "The sum is $n."),
    _tool("query_database", "Run an SQL query.", [("sql", "s", "The query", "sql")],
          "Run this query: $sql|Ask the database: $sql", '{"rows": $n}', "The query gave $n rows."),
    _tool("resize_image", "Change the size of an image.", [("path", "s", "Image file", "image"), ("width", "i", "Pixels", "pixels"), ("height", "i", "Pixels", "pixels")],
          "Resize $path to $width by $height pixels.|Make $path $width pixels wide and $height pixels high.", '{"saved": true}', "The image $path is resized."),
    _tool("water_plants", "Water the plants.", [("place", "s", "Where the plants are", "place"), ("liters", "n", "Amount of water", "decimal")],
          "Water the plants in the $place with $liters liters.|Give the plants in the $place $liters liters of water.", '{"status": "ok"}', "The plants in the $place have water."),
]  # fmt: skip

# Never declared or called in training dialogues.
HELD_OUT_TOOLS = {"convert_length", "get_time", "book_table", "lookup_contact", "write_file", "track_package"}
