package main

import (
	"fmt"
	"os"
	"time"

	"palimpsest/internal/auth"
	"palimpsest/internal/platform"
)

type tokenCmd struct {
	New tokenNewCmd `cmd:"" help:"Make a token: print its secret, which is stored nowhere, and the line for --token-file."`
}

type tokenNewCmd struct {
	Name     string        `help:"Who the token is for; the actor of what is committed with it. Tokens of one name share a rate." required:""`
	Scopes   []string      `help:"What it allows: some of append, read, repair, erase, admin." required:""`
	Sessions []string      `help:"Session ids that it allows this for; * stands for any characters." default:"*"`
	Expires  time.Duration `help:"After how long it ends, such as 720h. Default: never."`
	Rate     float64       `help:"Requests a second that it may send. Default: the program's --rate."`
	Burst    int           `help:"Requests that it may send at once. Default: the program's --burst."`
	Append   string        `help:"Add the line to this file instead of printing it." placeholder:"FILE" type:"path"`
}

func (c *tokenNewCmd) Run() error {
	usage := func(err error) error { return &platform.ExitError{Code: platform.ExitUsage, Err: err} }
	scopes, err := auth.ParseScopes(c.Scopes)
	if err != nil {
		return usage(fmt.Errorf("--scopes: %w", err))
	}
	if c.Expires < 0 || c.Rate < 0 || c.Burst < 0 {
		return usage(fmt.Errorf("--expires %v, --rate %v, --burst %d: expected nothing below 0", c.Expires, c.Rate, c.Burst))
	}
	grant := auth.Grant{Scopes: scopes}
	for _, s := range c.Sessions {
		grant.Sessions = append(grant.Sessions, auth.Pattern(s))
	}
	var expires time.Time
	if c.Expires > 0 {
		expires = time.Now().Add(c.Expires)
	}
	secret, entry, err := auth.NewToken(c.Name, []auth.Grant{grant}, expires)
	if err != nil {
		return usage(err)
	}
	entry.Rate, entry.Burst = c.Rate, c.Burst
	if c.Append != "" {
		f, err := os.OpenFile(c.Append, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
		if err == nil {
			_, err = fmt.Fprintln(f, entry.Line())
			if cerr := f.Close(); err == nil {
				err = cerr
			}
		}
		if err != nil {
			return err
		}
		_, err = fmt.Println(secret)
		return err
	}
	_, err = fmt.Printf("secret, shown this once:\n%s\n\nline for the token file:\n%s\n", secret, entry.Line())
	return err
}
