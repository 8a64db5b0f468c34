// Package access says WHO may reach WHAT: identities proven by certificates,
// the server's policy, the agent's rules about its own clients, and the guards
// that apply them. Whatever is not named is denied; a refusal is answered at
// once, counted and audited, and nothing is dialled for it.
package access
