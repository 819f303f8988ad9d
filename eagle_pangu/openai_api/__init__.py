"""An HTTP front that speaks OpenAI's API: completions, chat completions, models. Imports without torch.

A process of its own, and optional: it holds no state and asks an orchestrator over GenerationService. `app`
takes a request, `requests` reads it strictly, `options` turns it into GenerationOptions, `chat` or `completions` turns
the answer into OpenAI's objects, `streaming` sends them as events, `errors` says what went wrong in OpenAI's form.
"""
