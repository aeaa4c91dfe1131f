"""The page in the kit of a site, where every site trains a model of its own."""

README_OF_A_MEMBER = """# {site} in the consortium {consortium}

Every site trains a model for itself, with the others' help: {members_in_words}. At every step your machine
sends your model's parameters to the others, and each gives back the gradient of the loss on a batch of **its**
training rows. Yours does the same for them. Rows stay where they are; your model, its weights, your validation and
test rows and what comes out stay here, in `run`. The server at {server} passes messages on, which it can neither
read nor make up: your machine has a key of its own, which it makes itself. `coterie federate check .` shows its
fingerprint; tell it to the others by telephone, and write theirs under `[keys]` of `{file}`.
This folder is data: nothing in it is run. Your machine runs the `coterie` that you installed.

1. `pip install "./{wheel}[flare]"` in a Python environment of your own. The file is coterie itself: {lead}
   sends it with this folder. `sha256sum` must show `{digest}`. What it depends on comes from your package index.
2. `coterie federate accept .` shows the fingerprint of this folder. Compare it with {lead}, by telephone for
   example. It then writes `{file}`, which is yours: nobody else has a say in it.
3. Edit `{file}`: where your table is, how its columns are called, how you train, what you give at most (below).
4. `coterie federate check .` says what would be given. Nothing is sent.
5. `coterie federate site .` connects to {server}:{port}, trains when {lead} says so, and answers until you stop it
   (Ctrl-C). Your machine dials out; nothing needs to be opened in your firewall for incoming connections.
6. `coterie predict run FILE` applies your model to rows whose columns are called as in `preparation.json`;
   `run/index.html` says whether the others have helped.

The {n_others} others plan to ask you for at most {gradients} gradients in all, of {batch_size} rows each. What you
give, and how to give less, is in `[caps]` of `{file}`:

| setting | at first | meaning |
|---|---|---|
| `gradients` | {caps.gradients} | how many gradients you give in all, to all others and over every run |
| `norm` | {caps.norm:g} | a gradient is clipped to this norm |
| `examples` | {caps.examples} | no gradient of fewer rows than this is given |

Your machine draws the batches, by a secret of its own (`requests.jsonl.secret`): who asks cannot choose rows. A
gradient can still give away what is in the rows, and many gradients give away more. Every request is logged in
`requests.jsonl`: when, from whom, which step, how many rows, the norm. A site that you take out of `sites` is
neither asked nor answered.

Who has every x of your run, and that is every other site, can work out much of your own gradients too. So
nothing can be promised about a row here, as a site can where one leads.

`preparation.json` holds the medians, means, spreads and categories of {lead}'s rows, with which everybody's rows
are made into numbers. `client.key` is your key: whoever has it is you. Keep it.
"""
