"""Word lists shared by the prompt and dialogue generators."""
# ruff: noqa: E501 (template tables read better with one entry a line)

GIRLS = """Anna Maria Lily Sofia Emma Clara Nora Ruth Elena Priya Mei Aisha Fatima Zoe Hannah Julia Rosa Ingrid Olivia
Grace Amara Yuki Leila Tara Nina Eva Martha Ida Beth Carmen Dora Edith Freya Gina Helen Iris Jane Kate Laura Mona
Nadia Olga Paula Rita Sara Tess Uma Vera Wendy Yasmin Zara Alice Bella Daisy Hazel Ivy June Maya Molly Penny Ruby
Stella Violet Willow Chloe Naomi Esther Miriam Lucia Bianca Renata Sunita Kavya Linh Hana Sakura Abena Chipo""".split()
BOYS = """Tom Ben Sam Max Leo Jack Omar David Peter Paul Carlos Diego Ravi Kenji Ahmed Ivan Lars Noah Liam Henry
Oscar Felix Hugo Jonas Karl Luis Marco Nico Otto Pablo Quinn Rafael Simon Theo Victor Walter Yusuf Zane Adam Boris
Colin Dan Eric Frank George Harry Isaac James Kevin Louis Martin Nathan Oliver Philip Robert Stefan Tim Umar Vincent
Will Arthur Bruno Cyrus Dmitri Emil Finn Gavin Hassan Jorge Kwame Mateo Milo Ned Rohan Samir Tariq Wei Kofi Anton""".split()
NAMES = GIRLS + BOYS
SURNAMES = """Smith Brown Lee Garcia Khan Novak Silva Rossi Weber Jansen Kim Patel Singh Cohen Murphy Lopez Sato Ali
Berg Costa Dubois Evans Fischer Green Hall Ito Jones Keller Lind Moreno Nguyen Olsen Park Quinn Reed Santos Turner
Usman Vargas Wood Young Zhang Adams Baker Clark Diaz Ellis Ford Grant Hughes Ivanov Johnson King Lewis Martin Nash""".split()
ANIMALS = """dog cat rabbit fox bear owl mouse horse cow sheep goat pig duck goose hen frog turtle squirrel hedgehog deer
wolf lion tiger elephant monkey parrot crow sparrow penguin whale dolphin crab spider ant bee butterfly snail lizard
donkey camel kitten puppy pony swan otter beaver badger bat seal panda""".split()
JOBS = """baker teacher farmer doctor nurse driver painter singer writer gardener carpenter fisherman librarian sailor tailor
cook pilot engineer firefighter shopkeeper postman plumber dentist musician photographer scientist waiter builder
electrician mechanic lawyer judge dancer actor potter blacksmith shepherd clockmaker beekeeper florist barber
translator programmer astronomer vet lighthouse-keeper""".split()
PLACES = """village forest beach market school library kitchen garden park farm castle river island mountain harbour station
bakery museum hospital workshop bridge lake desert cave city meadow attic orchard playground lighthouse theatre zoo
greenhouse bookshop cafe field valley hotel tower bus train ship tent cellar""".split()
TOWNS = """Oakdale Riverton Millbrook Ashford Brighton Lisbon Oslo Madrid Cairo Delhi Kyoto Lima Quito Dublin Vienna Prague
Warsaw Athens Boston Denver Seattle Toronto Sydney Nairobi Accra Hanoi Seoul Manila Havana Geneva Turin Porto Leeds
Bergen Malmo Zurich Bruges Ghent Lyon Nantes Bonn Graz Split Varna Riga Tartu Perth Cardiff Salem Fairview""".split()
OBJECTS = """key book lamp map hat coat letter ring clock ball kite box basket cup mirror drum violin guitar bicycle boat
umbrella scarf blanket candle camera coin feather stone shell button ladder bucket hammer brush pencil notebook
suitcase wallet bottle necklace watch bell flute whistle rope lantern compass telescope spoon teapot doll puzzle""".split()
COLOURS = "red blue green yellow orange purple pink brown black white grey silver golden".split()
MOODS = """happy sad shy brave lonely curious angry tired worried proud lazy clever kind stubborn nervous cheerful gentle
honest greedy forgetful patient quiet noisy careful jealous hopeful grumpy polite clumsy generous""".split()
FOODS = """apple bread cheese soup rice cake honey tomato potato carrot orange banana pizza pasta egg pancake cookie pie
salad sandwich noodle bean onion pear grape lemon mushroom fish butter yoghurt""".split()
WEATHER = "rainy sunny windy snowy foggy stormy cold warm cloudy frosty".split()
TIMES = ["morning", "afternoon", "evening", "night", "spring day", "summer day", "autumn day", "winter day"]
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = "January February March April May June July August September October November December".split()
TOPICS = """rain|snow|the moon|the sun|stars|bread|milk|cheese|honey bees|trees|leaves|seeds|flowers|rivers|the sea|tides|
volcanoes|earthquakes|mountains|deserts|clouds|wind|thunder|rainbows|shadows|sound|light|magnets|electricity|batteries|
bicycles|trains|boats|aeroplanes|bridges|clocks|calendars|maps|money|banks|shops|post offices|libraries|schools|
hospitals|farms|gardens|soil|worms|spiders|birds|bird migration|fish|whales|dogs|cats|horses|cows|elephants|dinosaurs|
fossils|teeth|bones|the heart|the lungs|sleep|dreams|colds|exercise|vegetables|fruit|salt|sugar|tea|coffee|chocolate|
cooking|ovens|refrigerators|soap|glass|paper|books|writing|the alphabet|music|pianos|drums|singing|painting|colours|
photography|films|radio|telephones|computers|the internet|computer programs|robots|numbers|fractions|measuring length|
temperature|seasons|day and night|gravity|the planets|rockets|recycling|plastic|wood|metal|cotton|wool|shoes|umbrellas|
keys and locks|candles|matches and fire|lighthouses|castles|knights|pyramids|ancient Rome|the Olympic Games|football|
chess|swimming|running|friendship|honesty|patience|sharing|saving money|being on time|good manners|listening|
learning a language|reading aloud|keeping a diary|moving house|birthdays|holidays|weddings|markets|city life|
village life|camping|fishing|hiking|knitting|sewing|baking|growing tomatoes|keeping bees|taking care of a dog|
taking care of a cat|making friends|trains and timetables|traffic lights|road safety|first aid|washing hands|
brushing teeth|healthy breakfasts|drinking water|forests|islands|lakes|glaciers|polar bears|penguins|ants|butterflies|
frogs|owls|bats|wolves|sharks|coral reefs|sand|rocks|gold|iron|coal|oil|solar power|wind turbines|steam engines|
printing|newspapers|post|elections|laws|judges|cities|roads|houses|roofs|windows|chairs|mirrors|glasses|medicine|
vaccines|doctors|nurses|teachers|farmers|firefighters|bakers|pilots|sailors|astronauts|scientists|experiments""".replace(
    "\n", ""
).split("|")
HOWTO = """make a cup of tea|bake bread|boil an egg|plant a tree|grow tomatoes|wash a dog|clean a kitchen|pack a suitcase|
write a letter|say sorry|make a new friend|learn a new word|read a map|fix a flat tyre|ride a bicycle|swim|build a kite|
make pancakes|cook rice|make vegetable soup|tidy a bedroom|save money|plan a birthday party|take a good photograph|
paint a wall|sew on a button|iron a shirt|light a fire safely|put up a tent|find north without a compass|fall asleep|
wake up early|study for a test|tell a story|learn to draw|play chess|take care of a houseplant|make a bird feeder|
keep a diary|stay warm in winter|stay cool in summer|cross the road safely|use a library|make a salad|make lemonade|
wrap a present|sharpen a pencil|clean a window|write a shopping list|make a simple budget|learn to type|
choose a good password|back up files|write a short program|debug a program|give a short speech|listen well|
calm down when angry|help a sick friend|train a puppy|feed a cat|keep bees|make candles|knit a scarf|fold a paper boat|
catch a fish|milk a cow|store apples|recycle paper|compost kitchen waste|mend a torn shirt|tie a shoelace""".replace(
    "\n", ""
).split("|")
THEMES = """finds a lost NOUN|wants to learn to cook|is afraid of the dark|helps a ANIMAL|loses a NOUN|gets lost in the PLACE|
wins a race|makes a new friend|tells a lie and is sorry|saves a ANIMAL|builds a NOUN|opens a small shop|hears a strange sound|
discovers a secret door|receives a COLOUR NOUN|goes on a long journey|learns to share|plants a tiny seed|
has a very bad day|forgets an important promise|meets a JOB|moves to a new town|misses the last train|
finds a message in a bottle|repairs an old NOUN|bakes a cake for a neighbour|stays up all night|teaches a ANIMAL a trick|
solves a small mystery about a missing NOUN|trades a NOUN for a NOUN|visits a grandmother|has to say goodbye|
learns that being kind matters|finds courage in a storm|sees snow for the first time|writes a letter to a stranger|
tries to catch a thief|wakes up in the PLACE|discovers a map in a NOUN|wants to be a JOB|cannot sleep|
takes part in a contest|has a quarrel with a best friend|finds out why the PLACE is empty|talks to a ANIMAL|
learns to be patient|has to choose between a NOUN and a friend|gets a surprise visit|hides in the PLACE|
makes a mistake at work|earns some money|follows a ANIMAL into the PLACE|keeps a promise""".replace("\n", "").split("|")

# Kept out of the training dialogues (not out of the sampled stories), so that evaluation asks about unseen people.
HELD_OUT_NAMES = """Sofia Priya Olivia Tara Paula Stella Willow Esther Omar Peter Hugo Walter Frank Louis Robert
Gavin Arthur Nathan""".split()


def names(held_out: bool) -> list[str]:
    """First names for the training dialogues, or those kept for evaluation."""
    return HELD_OUT_NAMES if held_out else [n for n in NAMES if n not in HELD_OUT_NAMES]
