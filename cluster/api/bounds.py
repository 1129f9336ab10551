"""How much of everything a request may have. Beyond a bound the answer is a 400 that names the field and the bound.

docs/api.md lists them. Work that these bounds admit never stops the event loop for longer than a step of the model.
"""

BODY_FIELDS = 1024  # of a body, unknown ones included
BODY_PARTS = 1 << 16  # strings, lists and objects of a body; parsing that many takes about 10 ms
BODY_VALUES = 1 << 19  # values of a body, numbers included: token ids; about 30 ms

OUTPUTS = 1024  # prompts times n
INPUTS = 2048  # texts of a request for embeddings; OpenAI's bound
QUESTIONS = 400  # of a request for decisions; OpenAI's bound, as are the next two
QUESTION_CHOICES = 255  # of one question
QUESTION_LEVELS = 10  # of a score
MESSAGES = 4096  # of a chat
MESSAGE_PARTS = 4096  # parts of content and tool calls of a chat, all messages together
ROLE_CHARS = 64
ARGUMENTS_CHARS = 1 << 22  # of all calls of a conversation whose arguments are strings; their JSON counts like a body's
CONVERSATION_CHARS = 1 << 22  # of all items of a response's conversation, previous responses included
CONVERSATION_URLS_CHARS = 20 << 20  # of their pictures, which are data as a rule
ITEM_NAME_CHARS = 1024  # a call's id, and the name and the namespace of its function
METADATA_KEY_CHARS = 64  # OpenAI's bound
TOOLS = 128  # OpenAI's bound
TOOLS_CHARS = 1 << 17  # all tools as JSON
TEMPLATE_CHARS = 1 << 17  # a request's own chat template; its variables as JSON
TRUNCATED_CHARS = 1 << 18  # a text that is cut or only counted may always have this many, however short the context
TRUNCATED_PER_TOKEN = 32  # … and this many for each token of the context
DETOKENIZED = 1 << 17  # token ids, or as many as the context holds

STOPS = 64
STOP_CHARS = 4096  # one stop string
ALL_STOPS_CHARS = 1 << 14
STOP_TOKENS = 1024
BIASES = 1024
ALLOWED_TOKENS = 1 << 14
CACHE_SALT_CHARS = 1024
BAD_WORDS = 128
BAD_WORD_CHARS = 1024
DOCUMENTS = 1024
LOGPROB_TOKENS = 128  # vLLM's bound
FEW_LOGPROBS = 20  # alternatives per token, OpenAI's bound: answers are not counted, since each has few
MANY_LOGPROBS = 1 << 20  # in all, of an answer with more per token; about 60 MB as JSON

GRAMMAR_CHARS = 1 << 16  # a schema as JSON, a regex, a Lark grammar, or all entries of a choice together
GUIDED_CHOICES = 1024  # entries of a choice

SHOWN_CHARS = 200  # of the client's input in an error message
MESSAGE_CHARS = 1000  # of an error message
