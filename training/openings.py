"""How people begin what they ask of an assistant, for prompts that the model goes on writing itself.

Left to itself an instruct model hardly ever writes a user who brings a text along: to be rewritten, translated, or
searched. Heads that never saw such answers guess badly there.
"""

OPENINGS = (
    "Rewrite the following text so that it sounds more formal:\n\n",
    "Rewrite this paragraph in simple words:\n\n",
    "Correct the spelling and the grammar of this text, and change nothing else:\n\n",
    "Make this email shorter and friendlier:\n\n",
    "Change all verbs of this paragraph to the past tense:\n\n",
    "Translate the following sentences into French:\n\n",
    "Translate this text into Spanish:\n\n",
    "Translate this paragraph into German:\n\n",
    "Extract all names, dates and places from this text as a list:\n\n",
    "Turn the following notes into a JSON object:\n\n",
    "List the ingredients that this recipe asks for:\n\n",
    "Which of these products are in stock? Answer with a table.\n\n",
    "Summarize this article in three sentences:\n\n",
    "Read the following text and answer the question behind it.\n\n",
    "What are the main points of this report?\n\n",
    "Here is a Python function. Rename its variables to something clearer and print it again.\n\n```python\n",
    "Add docstrings to this code:\n\n```python\n",
    "Find the bug in this function and print the corrected version:\n\n```python\n",
    "Write a Python function that",
    "Write a SQL query that",
    "Write a short shell script that",
    "Explain step by step how to solve this problem:",
    "A shop sells",
    "Solve for x:",
    "Write a story about",
    "Write an email to",
    "Give me a list of",
    "Explain to a child",
    "What is the difference between",
    "How do I",
)
