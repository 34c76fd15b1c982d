package main

// proxies are links on loopback: a way of its own for each pair of processes.
type proxies struct{ links []*link }

func (*proxies) place(string) (string, []string, error) { return "127.0.0.1", nil, nil }

// way makes a link that belongs to the processes at both ends: whoever is cut off loses all of its
// links.
func (n *proxies) way(target string, ends ...*process) (string, error) {
	l, err := newLink(target)
	if err != nil {
		return "", err
	}
	n.links = append(n.links, l)
	for _, p := range ends {
		p.links = append(p.links, l)
	}
	return l.addr, nil
}

func (*proxies) each(p *process, f func(*link)) error {
	for _, l := range p.links {
		f(l)
	}
	return nil
}

func (n *proxies) cut(p *process) error   { return n.each(p, (*link).cut) }
func (n *proxies) join(p *process) error  { return n.each(p, (*link).mend) }
func (n *proxies) slow(p *process) error  { return n.each(p, func(l *link) { l.slow(slowDelay) }) }
func (n *proxies) quick(p *process) error { return n.each(p, (*link).mend) }
func (n *proxies) reset(p *process) error { return n.each(p, (*link).reset) }

func (n *proxies) close() {
	for _, l := range n.links {
		l.close()
	}
}

// namespaces are the kernel's: each process is alone in one, behind an interface that can go down.
type namespaces struct{ n *network }

func (n *namespaces) place(name string) (string, []string, error) {
	host, err := n.n.add(name)
	return host, n.n.within(name), err
}

func (*namespaces) way(target string, _ ...*process) (string, error) { return target, nil }

func (n *namespaces) cut(p *process) error   { return n.n.cut(p.Name) }
func (n *namespaces) join(p *process) error  { return n.n.join(p.Name) }
func (n *namespaces) slow(p *process) error  { return n.n.narrow(p.Name) }
func (n *namespaces) quick(p *process) error { return n.n.widen(p.Name) }
func (n *namespaces) reset(p *process) error { return n.n.reset(p.Name) }
func (n *namespaces) close()                 {} // they end with the processes in them
