"""The service's protocol without I/O: what to send, what a reply means, when to ask again.

Every operation is a *flow*: a generator that yields `messages.Request` (send this), `messages.Sleep` (wait) or
`messages.Compute` (CPU work), is sent the answer, and returns the result. The clients only carry out what flows yield,
so a flow is tested by feeding it answers, without a server and without sleeping.
"""
